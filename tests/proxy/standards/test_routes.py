"""Routes that LiteLLM does not serve for a local model, asked of it as requests for an answer; compressed bodies."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from litellm_compaction.proxy.standards import encodings, routes
from litellm_compaction.proxy.standards.encodings import TooLarge, Unreadable, encoding_of, most_plain_bytes, plain
from litellm_compaction.proxy.standards.routes import counting, serving


class Application:
    """Answers as LiteLLM would, and keeps what it was asked."""

    def __init__(self, status: int = 200, tokens: int | None = 70, answer: dict[str, Any] | None = None) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._status, self._tokens = status, tokens
        self._answer = answer or {"id": "r", "output": [{"type": "compaction"}], "usage": {"input_tokens": 1}}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        content = b""
        while True:
            message = await receive()
            content += message["body"]
            if not message.get("more_body"):
                break
        length = dict(scope["headers"]).get(b"content-length")
        assert length is None or int(length) == len(content)
        try:
            self.asked.append((scope["path"], json.loads(content)))
        except ValueError:
            self.asked.append((scope["path"], {"raw": content}))
        if (count := counting()) is not None and self._tokens is not None:
            count(self._tokens)
        await send({"type": "http.response.start", "status": self._status, "headers": [(b"content-length", b"1")]})
        body = json.dumps(self._answer).encode()
        await send({"type": "http.response.body", "body": body[:5], "more_body": True})
        await send({"type": "http.response.body", "body": body[5:]})


async def is_guarded(model: object) -> bool:
    return model == "small"


class Unknown(Exception):
    """What LiteLLM raises for a wrong key."""


async def key_owner(scope: Any, headers: Mapping[str, str], path: str) -> object:
    if headers.get("authorization") == "wrong":
        raise Unknown(path)
    return "somebody"


async def asked(
    application: Application, path: str, body: Any, *, root: str = "", serve: Any = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    parts = [content[:3], content[3:]]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        assert headers.get("authorization") != "wrong", "read before the key is known"
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    listed = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": root + path, "root_path": root, "headers": listed}
    await (serve or serving(application, is_guarded, key_owner))(scope, receive, send)
    content = b"".join(message.get("body", b"") for message in sent)
    length = dict(sent[0]["headers"])[b"content-length"]
    assert int(length) in (1, len(content))
    return sent[0]["status"], json.loads(content)


@pytest.mark.parametrize("body", [{"model": "other", "input": "Hi."}, b"{", b"[]", b""])
async def test_others_go_their_own_way(body: Any) -> None:
    """Unread models and unreadable bodies are LiteLLM's."""
    application = Application()
    await asked(application, "/v1/responses/compact", body)
    [(path, given)] = application.asked
    assert path == "/v1/responses/compact"
    assert given == body or "raw" in given or given == []


async def test_a_refusal_of_anthropics_protocol_has_its_code() -> None:
    """Where the message names it, and nowhere else."""

    async def error(message: str) -> Any:
        async def application(scope: Any, receive: Any, send: Any) -> None:
            body = json.dumps({"type": "error", "error": {"message": message}}).encode()
            await send({"type": "http.response.start", "status": 400, "headers": [(b"content-length", b"1")]})
            await send({"type": "http.response.body", "body": body})

        _, told = await asked(application, "/v1/messages", {"model": "small"})  # type: ignore[arg-type]
        return told["error"]

    found = await error("`messages` has nothing to summarize (compaction_nothing_to_summarize).")
    assert found["details"] == {"error_code": "compaction_nothing_to_summarize"}
    assert "details" not in await error("Too long.")


async def test_a_compressed_body_is_handed_on_as_it_was() -> None:
    """For guarded models; LiteLLM has its own way with others."""
    for model, is_read in (("small", True), ("other", False)):
        application = Application()
        body = gzip.compress(json.dumps({"model": model, "input": "Hi."}).encode())
        await asked(application, "/v1/responses", body, content_encoding="gzip")
        [(_, given)] = application.asked
        assert ("raw" not in given) == is_read
    status, told = await asked(Application(), "/v1/responses", b"no gzip", content_encoding="gzip")
    assert status == 415
    assert "content-encoding" in told["error"]["message"]


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions", "/chat/completions", "/completions", "/v1/messages", "/openai/v1/responses"),
        *("/engines/small/chat/completions", "/openai/deployments/a/b/completions"),
        *("/v1/responses/compact", "/v1/messages/count_tokens"),
    ],
)
async def test_of_a_compressed_body_nothing_is_read_before_its_key_is_known(path: str) -> None:
    """A wrong one is answered by LiteLLM, which is asked for the route that answers; so a right one is good for it."""
    with pytest.raises(Unknown, match=r"/(completions|messages|responses)$"):
        await asked(Application(), path, b"", root="/proxy", content_encoding="gzip", authorization="wrong")
    body = gzip.compress(b'{"model": "small", "messages": [{"role": "user", "content": "Hello."}]}')
    application = Application()
    await asked(application, path, body, content_encoding="gzip", authorization="right")
    assert application.asked[0][1]["model"] == "small"


async def test_a_compressed_body_larger_than_all_that_is_unpacked_at_a_time_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once, and it is not read to its end."""
    for module in (encodings, routes):
        monkeypatch.setattr(module, "MOST_BYTES", 2)
    status, told = await asked(Application(), "/v1/responses", b"1234" * 9, content_encoding="gzip")
    assert status == 413
    assert "Send less" in told["error"]["message"]


BODY = b'{"model": "small", "input": "Hi"}'


def _zstd(body: bytes) -> bytes:
    found: bytes = pytest.importorskip("zstandard").compress(body)
    return found


@pytest.mark.parametrize(("name", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", _zstd)])
def test_a_body_is_read_as_it_was(name: str, pack: Callable[[bytes], bytes]) -> None:
    """And the word for its encoding goes; a damaged or an endless one is refused."""
    headers = [(b"Content-Encoding", name.encode()), (b"accept", b"*/*")]
    assert encoding_of(headers) == name.encode()
    assert plain(pack(BODY), headers) == (BODY, [(b"accept", b"*/*")])
    most = b" " * 8_000_000
    assert plain(pack(most), headers).content == most
    with pytest.raises(TooLarge, match=r"has more than 8\.0 MB"):
        plain(pack(most + b" "), headers)
    with pytest.raises(Unreadable, match=f"its content-encoding, {name}, says"):
        plain(b"{" + pack(BODY), headers)


def test_a_cut_body_is_refused() -> None:
    """Half a request is none."""
    with pytest.raises(Unreadable):
        plain(gzip.compress(BODY)[:-9], [(b"content-encoding", b"gzip")])


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package, and with the client's own way out."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(Unreadable, match=r"install `zstandard`.*enable_request_compression"):
        plain(b"", [(b"content-encoding", b"zstd")])


@pytest.mark.parametrize(
    ("packed_bytes", "most_bytes"),
    [(0, 8_000_000), (400_000, 8_000_000), (1_000_000, 20_000_000), (9_000_000, 128_000_000)],
)
def test_the_most_that_a_body_may_have(packed_bytes: int, most_bytes: int) -> None:
    """By what was sent; never more than all bodies may have together."""
    assert most_plain_bytes(packed_bytes) == most_bytes
    with pytest.raises(TooLarge, match=r"has more than 128\.0 MB"):
        most_plain_bytes(128_000_001)
