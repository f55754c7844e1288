"""Reads one JSON document from a server, and names the fault if it cannot; then what stands in it, if it does.

Foreign errors end here: callers see `ServerUnavailable` and nothing of httpx. The limit on unfolding a body holds for
answers too (`proxy/answer/transport.py`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing

import anyio
import httpx

from litellm_compaction.errors import ServerUnavailable

# A server may be busy, as while it loads a model: just then its last answer is the least sure, so it is waited for.
PATIENT_TIMEOUT_S = 30.0
MAX_BODY_BYTES = 4 * 1024 * 1024
# Encodings of a body: at most 1,000 bytes come of one. Of Brotli and Zstandard there may be millions.
ACCEPTED_ENCODINGS = "gzip, deflate"
_ENCODINGS = frozenset({"", "identity", "gzip", "x-gzip", "deflate"})
# Unfolded at once: at most 4 MB come of it, within 20 ms.
_FOLDED_BYTES = 4096
# Commas, colons and brackets: reading so many takes 50 to 100 ms, in which nothing else runs (CPython 3.11).
MOST_MARKS = 400_000
# Values that clients and LiteLLM put in place of a key that is not needed.
_PLACEHOLDER_KEYS = frozenset({"", "fake-api-key"})


class Unreached(ServerUnavailable):
    """No server took the connection."""


def unfolds_slowly(response: httpx.Response) -> bool:
    """Makes a compressed body come in pieces; returns False for an encoding that was not asked for.

    httpx unfolds all that has come at once: of 64 KB become 64 MB, and a list of encodings multiplies that.
    """
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return True
    if encoding not in _ENCODINGS:
        return False
    assert isinstance(response.stream, httpx.AsyncByteStream)  # noqa: S101 - of an asynchronous client
    response.stream = _Pieces(response.stream)
    return True


def is_quickly_read(content: bytes, *, asked_marks: int = 0) -> bool:
    """Returns True if parsing a JSON document holds nothing up: the structure takes the time, hardly the text.

    Args:
        asked_marks: of the structure that it was asked for besides what any document may have.
    """
    marks = (b",", b":", b"[", b"{")
    return len(content) <= MOST_MARKS or sum(map(content.count, marks)) <= MOST_MARKS + asked_marks


class _Pieces(httpx.AsyncByteStream):
    """A body in small pieces, with room for others between them."""

    def __init__(self, inner: httpx.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._inner:
            for start in range(0, len(data), _FOLDED_BYTES):
                yield data[start : start + _FOLDED_BYTES]
                await asyncio.sleep(0)

    async def aclose(self) -> None:
        await self._inner.aclose()


class NotThisApi(ServerUnavailable):
    """A server answered, but refused the key or does not speak the API that was asked for."""


class KeyRefused(NotThisApi):
    """A server answered, and wants another key, or one at all."""


def bearer(api_key: str | None) -> dict[str, str]:
    """The header that shows a key; none for a placeholder of clients and LiteLLM."""
    return {} if api_key is None or api_key in _PLACEHOLDER_KEYS else {"Authorization": f"Bearer {api_key}"}


async def fetch_json(
    http: httpx.AsyncClient,
    url: str,
    api_key: str | None,
    *,
    timeout_s: float = PATIENT_TIMEOUT_S,
    asked: object = None,
    api: str = "LM Studio's API",
) -> object:
    """The parsed body of a 2xx answer within `timeout_s`; `asked` is sent as JSON by a POST, None asks by a GET.

    Raises:
        KeyRefused: HTTP 401 or 403.
        NotThisApi: the answer is not JSON, larger than 4 MiB, or nothing but structure.
        Unreached: the server took no connection.
        ServerUnavailable: timeout, or a server that says that it cannot answer now (429, 5xx).
        ValueError, RecursionError: `asked` cannot be written as JSON.
    """
    method, content = ("GET", None) if asked is None else ("POST", json.dumps(asked).encode())
    given = {"Accept": "application/json", "Accept-Encoding": ACCEPTED_ENCODINGS, **bearer(api_key)}
    if content is not None:
        given["Content-Type"] = "application/json"
    headers = {name.encode(): value.encode("utf-8", "replace") for name, value in given.items()}
    where = f"{method} {without_userinfo(url)}"
    try:
        request = http.build_request(method, url, headers=headers, content=content)
        with anyio.fail_after(timeout_s):
            status, body = await _read_again(http, request)
    except httpx.ConnectTimeout as exc:
        raise Unreached(f"{where}: timeout, no connection") from exc
    except (httpx.TimeoutException, TimeoutError) as exc:
        raise ServerUnavailable(f"{where}: timeout, no answer within {timeout_s:g} s") from exc
    except httpx.ConnectError as exc:
        raise Unreached(f"{where}: no connection ({exc})") from exc
    except httpx.LocalProtocolError as exc:
        # Its words quote a header that cannot be sent, such as a key with a line end.
        raise ServerUnavailable(f"{where}: not sent ({type(exc).__name__}): correct `api_key`") from exc
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise ServerUnavailable(f"{where}: no usable answer ({type(exc).__name__}: {exc})") from exc
    if status in (401, 403):
        raise KeyRefused(f"{where}: HTTP {status}, the API key was refused")
    if status == 429 or status >= 500:
        raise ServerUnavailable(f"{where}: HTTP {status}")
    if body is None or not is_quickly_read(body):
        fault = f"more than {MAX_BODY_BYTES} bytes or {MOST_MARKS} values, or compressed as nobody has asked for"
        raise NotThisApi(f"{where}: not {api}, {fault}")
    if status >= 300:
        raise NotThisApi(f"{where}: not {api}, HTTP {status}")
    try:
        parsed: object = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise NotThisApi(f"{where}: not {api}, HTTP {status} without JSON") from exc
    return parsed


async def _read_again(http: httpx.AsyncClient, request: httpx.Request) -> tuple[int, bytes | None]:
    """The status and the body, None for one that is not read; tried twice if a failure says nothing about the server.

    A server that ends an idle connection, as Node.js does after 5 s (its docs, `server.keepAliveTimeout`), may do so in
    the moment of its next use. A connection that took too long may have waited for this process alone.
    """
    try:
        return await _read(http, request)
    except httpx.ConnectError:
        raise
    except (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout):
        return await _read(http, request)


async def _read(http: httpx.AsyncClient, request: httpx.Request) -> tuple[int, bytes | None]:
    async with aclosing(await http.send(request, stream=True)) as response:
        if not unfolds_slowly(response):
            return response.status_code, None
        body = bytearray()
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > MAX_BODY_BYTES:
                return response.status_code, None
        return response.status_code, bytes(body)


def without_userinfo(url: str) -> str:
    """An address without a user's name and password, for logs and errors."""
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def at(answer: object, *path: str) -> object:
    """The value at a path through an answer's objects; None if there is none."""
    for name in path:
        answer = answer.get(name) if isinstance(answer, dict) else None
    return answer


def text_at(answer: object, *path: str) -> str:
    """As `at`; "" for what is no text."""
    value = at(answer, *path)
    return value if isinstance(value, str) else ""


def positive(value: object) -> int | None:
    """A number of tokens or requests; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
