"""What a client clears behind a record is sent as it was while there is room, so that the server's cache lasts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

import pytest

from litellm_compaction.core.messages import Request
from tests.builders import JsonDict, as_bytes, calls, parsed, result, size, system, user
from tests.engine.bench import Bench, sent

NOTE = "[Old tool result content cleared]"


def _body(turn: int, chars: int = 1600, by: str = "parser") -> str:
    return "\n".join(f"{line * turn % 997}: the {by} reads token {line}" for line in range(chars // 28))


def _cleared(raw: list[JsonDict], how: str) -> list[JsonDict]:
    """The conversation as a client edits it that keeps its newest six results, or four in batches of ten."""
    results = [at for at, each in enumerate(raw) if each["role"] == "tool"]
    old = results[:-6] if how != "batches" else results[: max(len(results) // 10 * 10 - 4, 0)]
    if how == "unedited":
        return raw
    shown = list(raw)
    for at in old:
        text = raw[at]["content"]
        cut = f"{text[:300]}\n...\n{text[-300:]}\n[Tool result trimmed: kept both ends.]"
        shown[at] = {**raw[at], "content": cut if how == "cut" else NOTE}
    return shown


class _Told(NamedTuple):
    """Of the compacted prompts: the share that stood at the same place before; and the model calls in all."""

    share: float
    asked: int
    longest: int


async def _replayed(how: str) -> _Told:
    bench, raw = Bench(), [system("You are an agent. " * 40), user("Port the parser, and never touch the tests.")]
    before: list[str] = []
    shares: list[float] = []
    longest = 0
    for turn in range(50):
        shown = _cleared(raw, how)
        prepared = await bench.guard(shown, 8192)
        messages = sent(shown, prepared)
        now = as_bytes(messages)
        same = next((at for at, (one, other) in enumerate(zip(before, now, strict=False)) if one != other), len(before))
        if prepared.messages is not None:
            shares.append(sum(map(size, messages[:same])) / sum(map(size, messages)))
            longest = max(longest, prepared.count.tokens)
        before = now
        raw += [calls(f"c{turn}", arguments=json.dumps({"path": f"src/{turn}.py"})), result(f"c{turn}", _body(turn))]
    return _Told(sum(shares) / len(shares), len(bench.ask.prompts), longest)


@pytest.mark.parametrize("how", ["each", "batches", "cut"])
async def test_a_client_that_clears_costs_no_more_than_one_that_does_not(how: str) -> None:
    """Seven tenths of a prompt stand where they stood, no model is asked more often, and no prompt is larger."""
    told, unedited = await _replayed(how), await _replayed("unedited")
    assert told.share >= 0.7
    assert told.asked <= unedited.asked
    assert told.longest <= 0.8 * 8192


async def _prompts(*histories: list[JsonDict]) -> list[str]:
    """The newest prompt for each of some requests, one after the other."""
    bench = Bench()
    found = []
    for raw in histories:
        prepared = await bench.guard(raw, 4096)
        found.append("\n".join(each.text for each in sent(raw, prepared)))
    return found


def _history(newest: str, *more: JsonDict) -> list[JsonDict]:
    raw = [user("Port it.")]
    for number in range(9):
        raw += [calls(f"o{number}"), result(f"o{number}", _body(number))]
    return [*raw, calls("last"), result("last", newest), *more]


MORE = [calls("next"), result("next", "fine")]


async def test_what_was_sent_is_sent_again() -> None:
    """Behind a record; other data, never shown whole, or cleared by order, is what the client says it is."""
    whole = _body(3, 600)
    *_, restored = await _prompts(_history(whole), _history(NOTE, *MORE))
    assert whole in restored
    assert NOTE not in restored
    *_, other = await _prompts(_history(whole), _history("No matches found", *MORE))
    assert whole not in other
    (unseen,) = await _prompts(_history(NOTE, *MORE))
    assert NOTE in unseen
    bench = Bench()
    await bench.guard(_history(whole), 4096)
    (last,) = parsed([result("last", whole)])
    ordered = [replace(each, received=last) if each.text == NOTE else each for each in parsed(_history(NOTE, *MORE))]
    prepared = await bench.compactor.guard(Request(messages=tuple(ordered)), bench.context(4096))
    assert whole not in "".join(each.text for each in prepared.messages or ordered)


async def test_of_two_conversations_with_equal_words_neither_is_restored() -> None:
    """Either may be another person's (P9)."""
    anna, bert = _body(3, 600, "anna"), _body(3, 600, "bert")
    *_, newest = await _prompts(_history(anna), _history(bert), _history(NOTE, *MORE))
    assert not any(name in newest for name in ("anna", "bert"))
