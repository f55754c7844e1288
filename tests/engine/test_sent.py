"""What a client clears behind a record is sent as it was while there is room, so that the server's cache lasts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest

from litellm_compaction.core.identity import Listed, Relisted, relisted
from litellm_compaction.core.messages import Request
from tests.builders import JsonDict, as_bytes, assistant, calls, parsed, result, size, system, user
from tests.engine.bench import SUMMARY, Bench, FakeAsk, sent

NOTE = "[Old tool result content cleared]"


def _body(turn: int, chars: int = 1600, by: str = "parser") -> str:
    return "\n".join(f"{line * turn % 997}: the {by} reads token {line}" for line in range(chars // 28))


def _cleared(raw: list[JsonDict], how: str) -> list[JsonDict]:
    """The conversation of a client that keeps its newest six results, or four in batches of ten, or sends the last."""
    if how.startswith("last"):
        return [*raw[: 1 + ("task" in how)], *raw[2:][-60:]]
    results = [at for at, each in enumerate(raw) if each["role"] == "tool"]
    old = results[:-6] if how != "batches" else results[: max(len(results) // 10 * 10 - 4, 0)]
    if how == "unedited":
        return raw
    shown = list(raw)
    for at in old:
        text = raw[at]["content"]
        cut = f"{text[:300]}\n...\n{text[-300:]}\n[Tool result trimmed: kept both ends.]"
        head = f"[Trimmed: read output — {len(text)} chars → 200 char preview]\n{text[:200]}..."
        shown[at] = {**raw[at], "content": {"cut": cut, "head": head, "word": "[cleared]"}.get(how, NOTE)}
    return shown


class _Told(NamedTuple):
    """Of the compacted prompts: the share that stood at the same place before; and the model calls in all."""

    share: float
    asked: int


async def _replayed(how: str) -> _Told:
    bench, raw = Bench(), [system("You are an agent. " * 40), user("Port the parser, and never touch the tests.")]
    before: list[str] = []
    shares: list[float] = []
    for turn in range(50):
        shown = _cleared(raw, how)
        prepared = await bench.guard(shown, 8192)
        messages = sent(shown, prepared)
        now = as_bytes(messages)
        same = next((at for at, (one, other) in enumerate(zip(before, now, strict=False)) if one != other), len(before))
        if prepared.messages is not None:
            shares.append(sum(map(size, messages[:same])) / sum(map(size, messages)))
        before = now
        raw += [calls(f"c{turn}", arguments=json.dumps({"path": f"src/{turn}.py"})), result(f"c{turn}", _body(turn))]
    return _Told(sum(shares) / len(shares), len(bench.ask.prompts))


@pytest.mark.parametrize("how", ["each", "word", "batches", "cut", "head", "last", "last and task"])
async def test_a_client_that_clears_costs_no_more_than_one_that_does_not(how: str) -> None:
    """Seven tenths of a prompt stand where they stood, and no model is asked more often, but for the first list."""
    told, unedited = await _replayed(how), await _replayed("unedited")
    assert told.share >= (0.65 if how in ("word", "head") else 0.7)
    assert told.asked <= unedited.asked + 2 * how.startswith("last")


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
TALK = [each for n in range(40) for each in (user(f"Ask {n}. {_body(n + 2, 500)}"), assistant(_body(n + 3, 700)))]
LATER = [*MORE, calls("then"), result("then", "done")]


async def test_what_was_sent_is_sent_again() -> None:
    """Behind a record; other data, never shown whole, or cleared by order, is what the client says it is."""
    whole = _body(3, 600)
    *_, restored = await _prompts(_history(whole, *MORE), _history(NOTE, *LATER))
    assert whole in restored
    assert NOTE not in restored
    *_, other = await _prompts(_history(whole, *MORE), _history("No matches found", *LATER))
    assert whole not in other
    (unseen,) = await _prompts(_history(NOTE, *LATER))
    assert NOTE in unseen
    bench = Bench()
    await bench.guard(_history(whole, *MORE), 4096)
    (last,) = parsed([result("last", whole)])
    ordered = [replace(each, received=last) if each.text == NOTE else each for each in parsed(_history(NOTE, *LATER))]
    prepared = await bench.compactor.guard(Request(messages=tuple(ordered)), bench.context(4096))
    assert whole not in "".join(each.text for each in prepared.messages or ordered)


async def test_of_two_conversations_with_equal_words_neither_is_restored() -> None:
    """Either may be another person's (P9)."""
    anna, bert = _body(3, 600, "anna"), _body(3, 600, "bert")
    for histories in ([anna, bert], [anna, bert, anna]):
        *_, newest = await _prompts(*(_history(each, *MORE) for each in histories), _history(NOTE, *LATER))
        assert not any(name in newest for name in ("anna", "bert"))


@pytest.mark.parametrize("every", [1, 1000])
@pytest.mark.parametrize("depth", [1, 4, 0, -1, -6, -12])
async def test_what_moves_with_each_request_costs_nothing(depth: int, every: int) -> None:
    """Of a note at the same distance from the end the model sees the newest; or files, or words in the last ones."""
    bench, raw = Bench(), list[JsonDict]()
    for turn in range(30):
        raw.append(user(f"Ask {turn // every}. {_body(turn // every + 2, 900)}"))
        shown, note = [system("You are a narrator."), *raw], f"[Note {turn // every}: keep it dark.]"
        files = [user(f"{note}\n```\n{_body(turn // every, 2000)}\n```"), assistant("Ok.")]
        block = [system(note), system("[Note 0")] if depth else files
        ends = [{**each, "content": f"{each['content']}\n{note}"} for each in shown[depth:]]
        at, end = (depth, None) if depth < 0 else (-(depth or 1), -(depth or 1))
        shown[at:end] = ends if depth < 0 else block
        prepared = await bench.guard(shown, 8192)
        notes = [each.text[:12] for each in prepared.messages or parsed(shown) if each.text.startswith("[Note")]
        assert notes == [note[:12], "[Note 0"] or depth < 1
        raw.append(assistant(_body(turn + 3, 900)))
    assert prepared.round >= 2
    assert len(bench.ask.prompts) <= (9 if depth < -6 else 5)


@pytest.mark.parametrize("reason", ["", "not all is told", "left out once", "elsewhere", "two places", "other words"])
async def test_what_a_client_leaves_out_twice_its_record_stands_for(reason: str) -> None:
    """Nobody is asked again; what a record does not tell, or was left out once, as if deleted, is in no prompt."""
    bench, few = Bench(), reason == "not all is told"
    for shown in [TALK[:61], *[TALK[2:63]] * (reason != "left out once"), *[TALK[4:77]] * few]:
        await bench.guard(shown, 8192)
    asked, last = len(bench.ask.prompts), {"elsewhere": [TALK[2], *TALK[5:65]], "not all is told": TALK[64:79]}
    last |= {"other words": [*TALK[4:44], user("No."), *TALK[45:65]], "two places": [*TALK[4:24], *TALK[25:65]]}
    prepared = await bench.guard(last.get(reason, TALK[4:65]), 8192)
    assert (len(bench.ask.prompts) == asked and prepared.round > 0) == (reason == "" or few)
    assert not (few and any(each.text == TALK[61]["content"] for each in prepared.messages or ()))
    few = Listed(parsed([*TALK[:8], *TALK[18:21], user("Why?")]))
    assert relisted(Relisted(Listed(parsed(TALK[:21]))), few, 11) is None


async def test_who_deletes_twice_at_one_place_is_told_of_neither() -> None:
    bench = Bench()
    for gone, end in ((20, 61), (22, 63), (22, 65)):
        await bench.guard([*TALK[:20], *TALK[gone:end]], 8192)
    asked = len(bench.ask.prompts)
    await bench.guard([*TALK[:20], *TALK[24:67]], 8192)
    assert len(bench.ask.prompts) > asked


@pytest.mark.parametrize(
    ("names", "after"),
    [
        *(("abcdefgh", range(8)), ("abaab", (-10, -2, -2, 0, 1)), ("cabcab", (-10, -2, -2, -8, -1, 0))),
        *(("cbab", (-4, -3, -2, -1)), ("cbab", (-4, -3, -2, -2)), ("eabcae", (-10, -10, -10, -10, -6, -1))),
    ],
)
@pytest.mark.parametrize("at", [0, 6])
async def test_what_is_written_anew_in_each_request_stands_beside_its_record(
    names: str, after: Sequence[int], at: int
) -> None:
    """What was written once may be a person's edit, or another person's (P9)."""
    bench, is_anew = Bench(ask=FakeAsk(lambda prompt: f"{SUMMARY}\n- I am {', '.join(found(prompt))}.")), "d" in names

    def found(text: str) -> set[str]:
        return {name for name in names if f"I am {name}." in text}

    for name, turns in zip(names, after, strict=True):
        data = f"\n\n<context>\n{_body(3)}\nIt is {name}.\n</context>" * is_anew
        shown = TALK[: 45 + 2 * turns]
        shown.insert(at, {"role": "system" if at else "user", "content": f"I am {name}.{data}"})
        asked, prepared = len(bench.ask.prompts), await bench.guard(shown, 8192)
        text = "".join(each.text for each in sent(shown, prepared))
        assert is_anew or found(text) == {name}
    assert not is_anew or (f"It is {name}." in text and len(bench.ask.prompts) == asked)


async def test_a_record_of_which_nothing_new_is_known_is_not_written_anew() -> None:
    """Its client's last messages change, so that no more is covered."""
    bench = Bench()
    for words, end in (("Go on.", 40), ("Go on.", 42), ("No.", 54), ("Go on.", 56)):
        asked = len(bench.ask.prompts)
        await bench.guard([user("Write."), *TALK[:22], user(words), *TALK[23:end]], 8192)
    assert len(bench.ask.prompts) == asked


@pytest.mark.parametrize("renewed", [3, 4])
def test_of_few_messages_that_are_written_anew_the_list_is_the_same(renewed: int) -> None:
    other = [user(f"No. {each['content']}") if at in range(0, 2 * renewed, 2) else each for at, each in enumerate(TALK)]
    assert bool(relisted(Relisted(Listed(parsed(TALK))), Listed(parsed(other)), 80)) == (renewed == 3)


@pytest.mark.parametrize("tenant", ["a", "b"])
async def test_what_a_client_changes_at_the_end_is_known_in_its_next_conversation(tenant: str) -> None:
    bench = Bench()
    for scope, talk in (("a", TALK[:20]), (tenant, TALK[20:76])):
        for end in range(len(talk) - 6, len(talk), 2):
            lines = [{**each, "content": f"{each['content']}\n<{end}>"} for each in talk[end - 6 : end]]
            await bench.guard([*talk[: end - 6], *lines, user("Go on.")], 8192, scope=scope)
    assert len(bench.ask.prompts) == 1 + (tenant == "b")
