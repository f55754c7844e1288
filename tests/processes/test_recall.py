"""A real proxy compacts conversations, and their owners find what was dropped: over HTTP, and in the shell."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp import ClientSession, StdioServerParameters, stdio_client

from litellm_compaction.cli import main
from litellm_compaction.recall import NOT_KEPT
from tests.builders import ONE_ROUND, talk
from tests.integration.bench import KEY, answers
from tests.integration.harness import MASTER_KEY, Proxy, lm_studio, proxy, write_config
from tests.integration.page_forms import ANNA, ARNO, BERT, KEYS
from tests.lmstudio_double import Model, Simulator, serve

_LIMIT_S = 60


@dataclass
class Running:
    proxy: Proxy
    folder: Path
    ending: ExitStack

    def get(self, path: str, key: str = ANNA, **params: str) -> httpx.Response:
        return self.proxy.client.get(path, params=params, headers={"Authorization": f"Bearer {key}"})

    def compact(self, messages: list[dict[str, Any]], key: str = ANNA, model: str = "small") -> None:
        body = {"model": model, "messages": messages, "max_tokens": 32}
        answer = self.proxy.post(body, headers={"Authorization": f"Bearer {key}"})
        answer.raise_for_status()
        assert answer.headers["x-litellm-compaction"] == "compacted"

    def found(self, query: str, key: str = ANNA) -> list[dict[str, Any]]:
        """The hits as soon as there are any: originals are kept behind the answer."""
        deadline_s = time.monotonic() + _LIMIT_S
        while not (hits := self.get("/compaction/recall", key, q=query).raise_for_status().json()["hits"]):
            assert time.monotonic() < deadline_s, "nothing was kept"
        return list(hits)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    shutil.copy(KEYS, tmp_path)
    simulator = Simulator([Model(KEY)])
    simulator.script = answers()
    simulator.load(KEY, 8192)
    with ExitStack() as stack:
        base_url = stack.enter_context(serve(simulator)).base_url
        entries = [
            lm_studio("small", KEY, base_url),
            lm_studio("quiet", KEY, base_url, compaction={"keep_originals": "off"}),
        ]
        auth = {"custom_auth": "page_keys.user_api_key_auth"}
        config = write_config(tmp_path, entries, {"keep_originals": "compacted"}, general_settings=auth)
        ending = stack.enter_context(ExitStack())
        yield Running(ending.enter_context(proxy(config)), tmp_path, ending)


def told(topic: str, said: str) -> list[dict[str, Any]]:
    """A long conversation with an exchange near its beginning that nothing later repeats."""
    first, *rest = talk(topic, ONE_ROUND)
    return [first, {"role": "user", "content": said}, {"role": "assistant", "content": "Noted."}, *rest]


async def by_mcp(base_url: str, key: str) -> str:
    """What the SDK's own client is told by `litellm-compaction mcp` of a search, and of the best hit as a whole."""
    command = [sys.executable, "-m", "litellm_compaction.cli", "mcp", "--url", base_url]
    child = StdioServerParameters(command=command[0], args=command[1:], env={**os.environ, "LITELLM_KEY": key})
    async with stdio_client(child) as (incoming, outgoing), ClientSession(incoming, outgoing) as session:
        await session.initialize()
        assert len((await session.list_tools()).tools) == 2
        said = [await session.call_tool("search_history", {"query": "walrus"})]
        [handle, *_] = re.findall(r'"handle": "(\w+)"', repr(said[0].content))
        said.append(await session.call_tool("get_message", {"handle": handle}))
    return repr([each.content for each in said])


def test_what_was_dropped_is_found_by_its_owner_alone(
    running: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By HTTP and in the shell; a stranger gets the same 404 as for a forged handle; no log has a word of it."""
    # First: had it kept something, that would stand there before the others.
    running.compact(told("quiet work", "The walrus is called Quentin."), model="quiet")
    running.compact(told("anna's work", "The walrus is called Archibald."))
    running.compact(told("bert's work", "The walrus is called Bartholomew."), BERT)
    [hit, *_] = running.found("walrus")
    assert "Archibald" in repr(hit)
    assert "Bartholomew" in repr(running.found("walrus", BERT))
    assert "Archibald" in repr(running.found("walrus", ARNO)), "of the same team"
    message = running.get(f"/compaction/messages/{hit['handle']}").raise_for_status().json()
    assert message["parts"] == [{"role": "user", "call": "", "text": "The walrus is called Archibald."}]
    stranger = running.get(f"/compaction/messages/{hit['handle']}", BERT)
    forged = running.get("/compaction/messages/0123456789ab", BERT)
    assert (stranger.status_code, stranger.text) == (forged.status_code, forged.text)
    assert forged.json() == {"error": {"message": NOT_KEPT, "code": 404}}
    assert running.get("/compaction/recall", q="Archibald", key=BERT).json()["hits"] == []
    assert running.get("/compaction/recall", q="walrus", key="sk-wrong").status_code == 401
    assert running.get("/compaction/recall", q="").status_code == 400
    told_of = asyncio.run(by_mcp(running.proxy.base_url, BERT))
    assert ("Bartholomew" in told_of, "Archibald" in told_of) == (True, False)
    running.proxy.expect_logged("GET /compaction/recall")
    assert not running.proxy.logged("walrus|Archibald|Bartholomew|failed_open|originals_")

    running.ending.close()
    monkeypatch.delenv("LITELLM_COMPACTION_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(running.folder))
    monkeypatch.setenv("LITELLM_MASTER_KEY", MASTER_KEY)
    assert main(["recall", "--json", "--last", "20", "walrus"]) == 0
    shown = capsys.readouterr().out
    assert len(json.loads(shown)["hits"]) >= 2
    assert "Archibald" in shown
    assert "Bartholomew" in shown
    assert "Quentin" not in shown
    files = list(running.folder.rglob("store.sqlite3*"))
    assert files
    assert b"Archibald" not in b"".join(path.read_bytes() for path in files)
