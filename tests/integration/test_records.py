"""Receipts and records through a real proxy: each answer names its record, whose owner sees it before and after."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.builders import ONE_ROUND, answered, talk
from tests.integration.bench import Group, Watch, open_bench
from tests.integration.harness import Proxy, Streamed
from tests.integration.page_forms import ADMIN, ANNA, AUTH, BERT
from tests.integration.restart_bench import Carrier, both_carriers
from tests.lmstudio_double import Simulator

_LIMIT_S = 60
_PREFIX = "x-litellm-compaction-"
KEY_OF_ANNA = {"Authorization": f"Bearer {ANNA}"}


@dataclass
class Running:
    proxy: Proxy
    simulator: Simulator
    folder: Path

    def get(self, record: str, key: str = ANNA, **headers: str) -> httpx.Response:
        known = {"Authorization": f"Bearer {key}"}
        return self.proxy.client.get(f"/compaction/records/{record}", headers={**known, **headers})

    def ask(self, messages: list[dict[str, Any]], key: str = ANNA, **body: Any) -> httpx.Response:
        sent = {"model": "small", "messages": messages, "max_tokens": 32, **body}
        return self.proxy.post(sent, headers={"Authorization": f"Bearer {key}"}).raise_for_status()

    def stream(self, messages: list[dict[str, Any]], key: str = ANNA) -> Streamed:
        sent = {"model": "small", "messages": messages, "max_tokens": 32, "stream": True}
        sent["stream_options"] = {"include_usage": True}
        return self.proxy.stream_body(sent, Authorization=f"Bearer {key}")

    def watch(self) -> Watch:
        return Watch(self.simulator, len(self.simulator.requests))


@pytest.fixture(scope="module")
def running(carrier: Carrier, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp(f"records-{carrier}")
    settings = {"keep_originals": "compacted", "carrier": carrier}
    with open_bench(folder, [Group("small")], settings, general_settings=AUTH) as bench:
        yield Running(bench.proxy, bench.simulators["small"], folder)


def receipt(headers: httpx.Headers) -> dict[str, str]:
    return {name: headers[_PREFIX + name] for name in ("record", "covered", "digest")}


def soon(found: Callable[[], Any]) -> Any:
    """What is found as soon as there is anything: events and originals are kept after the answer."""
    deadline_s = time.monotonic() + _LIMIT_S
    while not (each := found()):
        assert time.monotonic() < deadline_s, "it never came"
    return each


@both_carriers
def test_every_answer_names_its_record(running: Running) -> None:
    """In headers if they can have it, else in the usage of the stream that was open; the next turn has the same."""
    messages = talk(f"receipts {running.folder.name}", ONE_ROUND)
    streamed = running.stream(messages)
    late = streamed.usages[-1].get("compaction", {})
    # The transport compacts in the open stream, the hooks before it.
    assert bool(late) == running.folder.name.startswith("records-auto")
    told = {name: late[name] for name in ("record", "covered", "digest")} if late else receipt(streamed.headers)
    again = running.ask(answered(messages, "Understood.", "Go on."))
    assert again.headers["x-litellm-compaction"] == "reused"
    assert receipt(again.headers) == told
    reused = running.stream(answered(messages, "Understood.", "Go on."))
    assert receipt(reused.headers) == told
    assert "compaction" not in reused.usages[-1]
    found = running.get(told["record"]).raise_for_status().json()
    assert found["digest"] == told["digest"]
    first, last = map(int, told["covered"].split("-"))
    assert last - first + 1 == found["events"][-1]["covered_messages"]
    # Its system prompt is the client's first message.
    assert first == 2


def test_what_is_undone_is_sent_as_it_is(running: Running) -> None:
    """The same request goes out whole and the next turn is compacted; only its owner undoes."""
    messages = talk(f"undone {running.folder.name}", 6300)
    watch = running.watch()
    record = receipt(running.ask(messages).headers)["record"]
    soon(lambda: running.get(record).json()["events"])
    address = f"/compaction/records/{record}/undo"
    for headers in (
        {"Authorization": f"Bearer {BERT}"},
        {"Authorization": f"Bearer {ADMIN}"},
        {"Authorization": f"Basic {ANNA}"},
        {"Cookie": f"token={ANNA}"},
    ):
        assert running.proxy.client.post(address, headers=headers).status_code in (401, 404)
    assert running.proxy.post({}, address, headers=KEY_OF_ANNA).json()["forgotten"] == 1
    assert running.get(record).status_code == 404
    before = len(watch.sent())
    again = running.ask(messages)
    assert again.headers["x-litellm-compaction"] == "none"
    assert not [name for name in again.headers if name == f"{_PREFIX}record"]
    assert before < len(watch.sent()) == len(messages)
    streamed = running.stream(messages)
    assert (streamed.headers["x-litellm-compaction"], len(watch.sent())) == ("none", len(messages))
    running.proxy.expect_logged("kept model=small .* reason=undone")
    later = running.ask(answered(messages, "Understood.", "Go on."))
    assert later.headers["x-litellm-compaction"] == "compacted"
    undone = running.proxy.post({}, f"/compaction/records/{receipt(later.headers)['record']}/undo", headers=KEY_OF_ANNA)
    assert undone.json()["forgotten"] == 1


def test_a_pinned_message_stays(running: Running) -> None:
    """Named by its words, in the compaction that comes and in the next one."""
    first, *rest = talk("pinned", ONE_ROUND)
    rule = "The walrus is called Archibald, and nobody else is."
    said = [first, {"role": "user", "content": rule}, {"role": "assistant", "content": "Noted."}, *rest]
    body: dict[str, Any] = {"model": "small", "messages": said, "max_tokens": 32}
    watch = running.watch()
    body["metadata"] = {"compaction": {"pin": [rule[:30]]}}
    answer = running.proxy.post(body, headers=KEY_OF_ANNA)
    assert answer.headers["x-litellm-compaction"] == "compacted", answer.text
    assert rule in watch.sent()[1]["content"]
    for _ in range(20):
        said = answered(said, "word " * 400, "Go on.")
        if running.ask(said).headers["x-litellm-compaction"] == "compacted":
            break
    else:
        raise AssertionError("never compacted again")
    assert rule in watch.sent()[1]["content"]
    assert not running.proxy.logged("Archibald")
