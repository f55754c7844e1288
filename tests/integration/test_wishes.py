"""Compact now, and what agents put behind results, through a real proxy: by every route and strategy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.builders import answered, talk
from tests.integration.bench import SUMMARY, Bench, Group, open_bench
from tests.integration.forms import form
from tests.integration.harness import CHAT
from tests.integration.restart_bench import Carrier, both_carriers
from tests.integration.validity import text_of

STRATEGIES = ("summary", "prune", "handoff")
FOCUS = "the database schema"
WISH = {"compaction": {"now": True, "focus": FOCUS}}
HEADER = "x-litellm-compaction"


@pytest.fixture(scope="module")
def bench(carrier: Carrier, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A model for each strategy, and one that is compacted on demand."""
    groups = [Group("now"), *(Group(f"open-{each}", compaction={"strategy": each}) for each in STRATEGIES)]
    folder = tmp_path_factory.mktemp(f"wishes-{carrier}")
    with open_bench(folder, groups, {"carrier": carrier, "window_cache_s": 600}) as opened:
        yield opened


def asked(bench: Bench, route: str, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
    """One whole answer, of the route's own shape."""
    path, body = form(route, "now", messages, limit=200)
    headers = more.pop("headers", {})
    return bench.proxy.post({**body, **more}, path, headers=headers)


@both_carriers
@pytest.mark.parametrize(
    ("route", "wish"),
    [
        ("chat", {"metadata": WISH}),
        ("chat", {"headers": {HEADER: "now"}}),
        ("messages", {"metadata": WISH}),
        # OpenAI's metadata holds strings only.
        ("responses", {"metadata": {"compaction": json.dumps(WISH["compaction"])}}),
    ],
)
def test_a_conversation_is_compacted_on_demand(bench: Bench, route: str, wish: dict[str, Any]) -> None:
    """At a fifth of the window: one summary that knows its topic, told in the header, reused by the next turn."""
    watch = bench.watch("now")
    messages = talk(f"on demand {route} {[*wish]}", 1700)
    answer = asked(bench, route, messages, **wish)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-litellm-compaction"] == "compacted"
    assert len(watch.summaries) == 1
    asked_for = text_of((watch.summaries[0].body or {})["messages"][-1])
    assert (FOCUS in asked_for) is ("metadata" in wish)
    assert FOCUS not in json.dumps(watch.sent())
    assert SUMMARY.splitlines()[1] in json.dumps(watch.sent())
    assert len(watch.sent()) < len(messages) / 2
    first = watch.sent()
    later = asked(bench, route, answered(messages, "Understood.", "Go on then."))
    assert later.headers["x-litellm-compaction"] == "reused"
    assert watch.sent()[: len(first)] == first
    assert len(watch.summaries) == 1


@pytest.mark.parametrize(
    ("route", "wish", "says"),
    [
        ("chat", {"headers": {HEADER: "perhaps"}}, "cannot be read"),
        ("messages", {"headers": {f"{HEADER}-focus": "x"}}, "metadata.compaction"),
        ("responses", {"metadata": {"compaction": '{"now": "yes"}'}}, "metadata.compaction.'now'"),
    ],
)
def test_a_bad_wish_is_refused(bench: Bench, route: str, wish: dict[str, Any], says: str) -> None:
    """400 with what is allowed, before anything is sent."""
    watch = bench.watch("now")
    answer = asked(bench, route, talk("bad wishes", 1000), **wish)
    assert answer.status_code == 400, answer.text
    assert says in answer.text
    assert watch.records_of(CHAT) == []
