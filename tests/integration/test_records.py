"""Receipts and records through a real proxy: each answer names its record, whose owner sees it before and after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.builders import ONE_ROUND, answered, talk
from tests.integration.bench import AUTH, Bench, Group, open_bench
from tests.integration.harness import Streamed, until
from tests.integration.page_forms import ADMIN, ANNA, BERT, look
from tests.integration.restart_bench import Carrier, both_carriers

_PREFIX = "x-litellm-compaction-"


@pytest.fixture(scope="module")
def running(carrier: Carrier, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp(f"records-{carrier}")
    settings = {"keep_originals": "compacted", "carrier": carrier}
    with open_bench(folder, [Group("small")], settings, general_settings=AUTH) as bench:
        yield bench


def receipt(headers: httpx.Headers) -> dict[str, str]:
    return {name: headers[_PREFIX + name] for name in ("record", "covered", "digest")}


def _look(running: Bench, record: str) -> httpx.Response:
    return look(running.proxy, f"records/{record}", ANNA)


def _ask(running: Bench, messages: list[dict[str, Any]]) -> httpx.Response:
    return running.proxy.by(ANNA).chat("small", messages, max_tokens=32).raise_for_status()


def _stream(running: Bench, messages: list[dict[str, Any]]) -> Streamed:
    usage = {"include_usage": True}
    return running.proxy.by(ANNA).stream("small", messages, max_tokens=32, stream_options=usage)


@both_carriers
def test_every_answer_names_its_record(running: Bench) -> None:
    """In headers if they can have it, else in the usage of the stream that was open; the next turn has the same."""
    messages = talk(f"receipts {running.folder.name}", ONE_ROUND)
    streamed = _stream(running, messages)
    late = streamed.usages[-1].get("compaction", {})
    # The transport compacts in the open stream, the hooks before it.
    assert bool(late) == running.folder.name.startswith("records-auto")
    told = {name: late[name] for name in ("record", "covered", "digest")} if late else receipt(streamed.headers)
    again = _ask(running, answered(messages, "Understood.", "Go on."))
    assert again.headers["x-litellm-compaction"] == "reused"
    assert receipt(again.headers) == told
    reused = _stream(running, answered(messages, "Understood.", "Go on."))
    assert receipt(reused.headers) == told
    assert "compaction" not in reused.usages[-1]
    found = _look(running, told["record"]).raise_for_status().json()
    assert found["digest"] == told["digest"]
    first, last = map(int, told["covered"].split("-"))
    assert last - first + 1 == found["events"][-1]["covered_messages"]
    # Its system prompt is the client's first message.
    assert first == 2


def test_what_is_undone_is_sent_as_it_is(running: Bench) -> None:
    """The same request goes out whole and the next turn is compacted; only its owner undoes."""
    messages = talk(f"undone {running.folder.name}", 6300)
    watch = running.watch("small")
    record = receipt(_ask(running, messages).headers)["record"]
    until(lambda: _look(running, record).json()["events"])
    address = f"/compaction/records/{record}/undo"
    for headers in (
        running.proxy.by(BERT).headers,
        running.proxy.by(ADMIN).headers,
        {"Authorization": f"Basic {ANNA}"},
        {"Cookie": f"token={ANNA}"},
    ):
        assert running.proxy.client.post(address, headers=headers).status_code in (401, 404)
    assert running.proxy.by(ANNA).post({}, address).json()["forgotten"] == 1
    assert _look(running, record).status_code == 404
    before = len(watch.sent())
    again = _ask(running, messages)
    assert again.headers["x-litellm-compaction"] == "none"
    assert not [name for name in again.headers if name == f"{_PREFIX}record"]
    assert before < len(watch.sent()) == len(messages)
    streamed = _stream(running, messages)
    assert (streamed.headers["x-litellm-compaction"], len(watch.sent())) == ("none", len(messages))
    running.proxy.expect_logged("kept model=small .* reason=undone")
    later = _ask(running, answered(messages, "Understood.", "Go on."))
    assert later.headers["x-litellm-compaction"] == "compacted"
    undone = running.proxy.by(ANNA).post({}, f"/compaction/records/{receipt(later.headers)['record']}/undo")
    assert undone.json()["forgotten"] == 1


def test_a_pinned_message_stays(running: Bench) -> None:
    """Named by its words, in the compaction that comes and in the next one."""
    first, *rest = talk("pinned", ONE_ROUND)
    rule = "The walrus is called Archibald, and nobody else is."
    said = [first, {"role": "user", "content": rule}, {"role": "assistant", "content": "Noted."}, *rest]
    body: dict[str, Any] = {"model": "small", "messages": said, "max_tokens": 32}
    watch = running.watch("small")
    body["metadata"] = {"compaction": {"pin": [rule[:30]]}}
    answer = running.proxy.by(ANNA).post(body)
    assert answer.headers["x-litellm-compaction"] == "compacted", answer.text
    assert rule in watch.sent()[1]["content"]
    for _ in range(20):
        said = answered(said, "word " * 400, "Go on.")
        if _ask(running, said).headers["x-litellm-compaction"] == "compacted":
            break
    else:
        raise AssertionError("never compacted again")
    assert rule in watch.sent()[1]["content"]
    assert not running.proxy.logged("Archibald")
