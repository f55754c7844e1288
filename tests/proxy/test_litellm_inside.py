"""LiteLLM from inside: the pool under the transport, and what its database keeps."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import litellm
import pytest
from starlette.requests import Request

from litellm_compaction.errors import StoreError
from litellm_compaction.proxy import litellm_inside
from litellm_compaction.proxy.litellm_inside import Seam


async def test_proxies_of_the_environment_are_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation with a local server never meets a proxy, although LiteLLM's transport would send it there.

    Nor does one wait for another's connection.
    """
    coming, both = [], asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        coming.append(await reader.readuntil(b"\r\n\r\n"))
        if len(coming) == 2:
            both.set()
        await both.wait()
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        # Nobody listens there.
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, litellm_inside.connect() as transport:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        asked = (transport.handle_async_request(httpx.Request("GET", url)) for _ in range(2))
        for response in await asyncio.wait_for(asyncio.gather(*asked), 60):
            assert response.status_code == 204
            await response.aclose()


@pytest.mark.parametrize(
    ("environ", "own", "verify", "is_pooled"),
    [
        ({}, {}, True, True),
        *(({"SSL_VERIFY": word}, {"ssl_verify": False}, True, True) for word in ("True", " 1 ", "yes")),
        ({"SSL_VERIFY": "FALSE"}, {}, False, True),
        ({"SSL_VERIFY": "ca.pem"}, {}, "ca.pem", True),
        ({}, {"ssl_verify": False}, False, True),
        ({}, {"ssl_verify": None}, True, True),
        *(({"DISABLE_AIOHTTP_TRANSPORT": word}, {}, True, False) for word in ("true", "1", "Yes ")),
        *(({"DISABLE_AIOHTTP_TRANSPORT": word}, {}, True, True) for word in ("false", "no")),
        ({}, {"disable_aiohttp_transport": True}, True, False),
    ],
)
async def test_litellms_switches_hold_for_guarded_servers(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], own: dict[str, Any], verify: object, is_pooled: bool
) -> None:
    """Of certificates, by the environment first, and of its pool."""
    trusts: list[object] = []
    context = ssl.create_default_context()
    monkeypatch.setattr(httpx, "create_ssl_context", lambda *, verify: trusts.append(verify) or context)
    for name in ("SSL_VERIFY", "DISABLE_AIOHTTP_TRANSPORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for name, value in {"ssl_verify": True, "disable_aiohttp_transport": False, **own}.items():
        monkeypatch.setattr(litellm, name, value)
    async with litellm_inside.connect() as transport:
        assert (trusts, isinstance(transport, httpx.AsyncHTTPTransport)) == ([verify], not is_pooled)


async def test_a_key_is_asked_about_without_what_came_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cookies are no keys of ours, and a body is none of LiteLLM's business."""

    async def shown(request: Request) -> object:
        return request.method, request.url.path, [*request.headers.items()], await request.json(), request.state._state

    monkeypatch.setattr(Seam.KEYS, "needed", lambda: shown)
    told = {"cookie": "token=sk-1", "content-type": "text/plain", "x-note": "content-free", "x-api-key": "cookie"}
    headers = [(name.encode(), value.encode()) for name, value in told.items()]
    asked = Request({"type": "http", "method": "POST", "path": "/", "headers": headers, "state": {"body": 1}})
    kept = [("x-note", "content-free"), ("x-api-key", "cookie")]
    assert await litellm_inside.key_owner(asked, "/compaction/settings") == (
        "GET",
        "/compaction/settings",
        kept,
        {},
        {},
    )


def test_what_the_proxy_has_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration, and its Redis, of which the operator is told what to set."""
    monkeypatch.setattr(Seam.CONFIG, "get", lambda: lambda: {"model_list": []})
    monkeypatch.setattr(Seam.REDIS, "get", lambda: SimpleNamespace(init_async_client=int))
    assert (litellm_inside.configuration(), litellm_inside.proxy_redis()) == ({"model_list": []}, 0)
    for seam in (Seam.CONFIG, Seam.REDIS):
        monkeypatch.setattr(seam, "get", lambda: None)
    assert litellm_inside.configuration() == {}
    with pytest.raises(StoreError, match="coordination_redis"):
        litellm_inside.proxy_redis()


def _stands_for(monkeypatch: pytest.MonkeyPatch, module: str, **members: Any) -> Any:
    """A module of LiteLLM's proxy of which no more is looked at."""
    made: Any = SimpleNamespace(**members)
    monkeypatch.setitem(sys.modules, f"litellm.proxy.{module}", made)
    return made


@pytest.mark.parametrize(
    ("database", "keeper", "keeps"),
    [
        (None, lambda: True, False),
        (object(), lambda: False, False),
        (object(), lambda: True, True),
        (object(), None, True),
    ],
    ids=["no database", "no prompts", "prompts", "another LiteLLM"],
)
def test_a_database_without_prompts_keeps_no_response(
    monkeypatch: pytest.MonkeyPatch, database: object, keeper: Any, keeps: bool
) -> None:
    """LiteLLM would find an empty row before a `previous_response_id`, and answer without the history."""
    members = {} if keeper is None else {"should_store_prompts_and_responses_in_spend_logs": keeper}
    _stands_for(monkeypatch, "proxy_server", prisma_client=database)
    _stands_for(monkeypatch, "spend_tracking.spend_tracking_utils", **members)
    assert litellm_inside.keeps_responses() is keeps


# Garbage that sets a context variable when it is collected, while a context variable is being set.
_PROVOKE = """
import contextvars, gc, random
from litellm_compaction.concurrency import hold_contexts
hold_contexts()
variables = [contextvars.ContextVar("v") for i in range(12)]
def in_a_cycle():
    me = yield
    try:
        yield me
    finally:
        variables[0].set(object())
random.seed({seed})
for i in range(60_000):
    if i % 50 == 0:
        gc.set_threshold(random.randint(3, 40), 1000, 1000)
    generator = in_a_cycle()
    next(generator)
    generator.send(generator)
    del generator
    variables[i % 12].set(object())
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_with_it_the_interpreter_lives(seed: int) -> None:
    """However often the collector meets a variable that is being set."""
    # Freed memory is overwritten, so that its use always shows.
    environ = {**os.environ, "PYTHONMALLOC": "debug"}
    script = _PROVOKE.replace("{seed}", str(seed))
    assert subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, check=False).returncode == 0
