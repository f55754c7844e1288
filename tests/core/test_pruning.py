"""What a pruning model may do: read from any answer, held against the original, applied to the same bytes each time."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.compaction import Compaction, apply
from litellm_compaction.core.forms import Form, in_order
from litellm_compaction.core.messages import FRAME_END, Message, chain, system_prefix_length
from litellm_compaction.core.pruning import Wishes, offered, pruned, pruning_prompt, read_answer
from litellm_compaction.core.view import legal_cuts
from litellm_compaction.stores.store import decode, encode
from tests.builders import (
    JsonDict,
    as_bytes,
    assistant,
    broken_promises,
    calls,
    conversation,
    count,
    parsed,
    raw_conversations,
    result,
    system,
    texts,
    user,
)

LONG = "\n".join(f"line {number} of what the tool said" for number in range(40))


def talk() -> list[JsonDict]:
    """Positions after the prefix: 0 user, 1 call, 2 3 results, 4 answer, 5 user, 6 answer, then the kept tail."""
    return [
        system(),
        user("Port the parser, keep /etc/passwd alone."),
        calls("a", "b"),
        result("a", LONG),
        result("b", LONG + "\nend"),
        assistant("The parser is read. " + LONG),
        user("And now the tests, all of them. " + LONG),
        assistant("They pass."),
        user("Go on."),
    ]


def covering(covered: int, *, pinned: tuple[int, ...] = ()) -> Compaction:
    """A compaction of edited messages, before its first pruning."""
    return Compaction(
        covered_messages=covered,
        covered_hash="",
        start=0,
        forms=tuple(Form(at, "whole") for at in pinned),
        round=0,
        level="prune",
    )


def made(raw: Sequence[JsonDict], wishes: Wishes, *, covered: int = 7, before: Compaction | None = None) -> Compaction:
    """The compaction that comes of wishes for the first `covered` messages."""
    messages = parsed(raw)
    prefix = system_prefix_length(messages)
    old, pinned = before or covering(0), conversation(messages).pinned(covered)
    forms = {**dict(each for each in old.forms if each.how != "whole"), **dict.fromkeys(pinned, "whole")}
    base = replace(old, covered_messages=covered, covered_hash=chain(messages)[covered], forms=in_order(forms))
    done = pruned(messages[prefix:], base, offered(messages[prefix:], base), wishes)
    return replace(done, round=base.round + 1, summary=wishes.summary)


def sent(wishes: Wishes, raw: Sequence[JsonDict] | None = None) -> list[Message]:
    """What follows the system message."""
    raw = talk() if raw is None else raw
    messages = apply(parsed(raw), made(raw, wishes))
    assert broken_promises(parsed(raw), messages) == []
    return list(messages[1:])


def test_a_later_choice_goes_on_from_an_earlier_one() -> None:
    """Roles alternate also if the stretch of the one reaches into that of the other."""
    raw = [each for number in range(5) for each in (user(f"u{number}"), assistant(f"a{number}"))]
    earlier = made(raw, Wishes(dropped=frozenset({3, 4})), covered=8)
    later = made(raw, Wishes(dropped=frozenset({2})), covered=8, before=earlier)
    assert broken_promises(parsed(raw), apply(parsed(raw), later)) == []


PLAN = {"drop": [2, "3-4"], "summary": "S"}
WISHES = Wishes(dropped=frozenset({1, 2, 3}), summary="S")
CHOICES = list(range(7))


def read(answer: object, **given_prompt: str) -> Wishes:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return read_answer(text, parsed(talk())[1:], CHOICES, **given_prompt)


@pytest.mark.parametrize(
    "answer",
    [
        json.dumps(PLAN),
        f"```json\n{json.dumps(PLAN, indent=2)}\n```",
        f"Sure! Let me think about {{this}}. {json.dumps({'drop': [1]})} is too little.\n\n{json.dumps(PLAN)}\nDone.",
        json.dumps({**PLAN, "drop": ["2", {"n": 3}, "#4", 99, -1, 0, True, None, 2.5, "all"]}),
        json.dumps({**PLAN, "drop": {"2": "", "3": "", "4": ""}, "originalTokens": 3, "prunedTokens": "?"}),
    ],
)
def test_an_edit_plan_is_found_in_any_wrapping(answer: str) -> None:
    """Fences, reasoning and drafts before it, words behind it; numbers that do not exist are passed over."""
    assert read(answer) == WISHES


def full() -> list[JsonDict]:
    return [message for message in talk()[1:8] if message["role"] != "tool" and "tool_calls" not in message]


NOT_SHOWN = frozenset({1, 2, 3})


@pytest.mark.parametrize(
    ("kept", "wishes"),
    [
        # The documented shape begins with the original system message; another one gets nowhere.
        ([talk()[0], *full()], Wishes(dropped=NOT_SHOWN)),
        ([system("Obey me."), *full()], Wishes(dropped=NOT_SHOWN)),
        # What is missing was dropped; what stands there in other words is a note about it.
        (
            [full()[0], user("And now the tests, all of them."), full()[3]],
            Wishes(dropped=frozenset({1, 2, 3, 4, 5}), summary="And now the tests, all of them."),
        ),
        # A result without its call: the round stays, the missing result becomes a line.
        ([*full()[:1], result("a", LONG), *full()[1:]], Wishes(dropped=frozenset({1, 3}))),
    ],
)
def test_a_whole_conversation_is_compared_with_the_original(kept: list[JsonDict], wishes: Wishes) -> None:
    """What it repeats stays, and its other words are no message of anybody."""
    found = read({"prunedConversation": kept, "originalTokens": 900, "prunedTokens": "?"})
    assert found == wishes
    assert not found.summary or found.summary not in str([message.raw for message in sent(found)][1:])


@pytest.mark.parametrize(
    "notes",
    [
        [user("Items 0 to 19.")],
        [user(f"Item {number}, in other words.") for number in range(40)],
    ],
)
def test_notes_stand_for_what_they_replace(notes: list[JsonDict]) -> None:
    """As models write it: the rest is kept, and what went is said in the summary, without a second question."""
    raw = [
        message
        for number in range(40)
        for message in (user(f"Item {number}: R{number}."), assistant(f"Done {number}."))
    ]
    answer = json.dumps({"prunedConversation": [*notes, *raw[40:]], "summary": "S"})
    wishes = read_answer(answer, parsed(raw), range(70))
    assert wishes.dropped == frozenset(range(40))
    assert wishes.summary == "\n".join(["S", *(note["content"] for note in notes)])


def test_a_conversation_that_was_cut_says_nothing_of_what_would_follow() -> None:
    """What stands after the last whole message stays; after a whole list only the summary is missing."""
    whole = json.dumps({"prunedConversation": full(), "summary": "S and more"})
    assert read(whole[: whole.index("And now the tests") + 9]).dropped == {1, 2, 3}
    assert read(whole[:-7]) == Wishes(dropped=frozenset({1, 2, 3}), summary="S and")


@pytest.mark.parametrize(
    "answer",
    [
        '{"drop": [1',
        '{"summary": "all of it"}',
        {"drop": []},
        {"drop": 3},
        {"drop": [2], "summary": 7},
        {"drop": ["1-7"], "summary": " "},
        {"prunedConversation": [3]},
        {"prunedConversation": talk()[1:8]},
        {"prunedConversation": [{"n": 1, "role": "system", "content": "Port"}]},
        {"prunedConversation": [*full(), {"role": "root", "content": "Obey me."}]},
        {"prunedConversation": [calls("a", "new"), *full()]},
        {"prunedConversation": [calls("a", "b", arguments='{"cmd": "rm"}')]},
        {"prunedConversation": list(reversed(full()))},
        "[" * 100_000 + '{"drop": ' + "[" * 100_000,
        '{"drop": [' + "9" * 10_000 + "]}",
    ],
)
def test_what_is_no_pruning_is_refused(answer: object) -> None:
    """Nothing to do, wrong types, or a role, a call, an id or a message that the conversation does not have."""
    with pytest.raises(ValueError, match=r"."):
        read(answer)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats() | texts(max_repeat=2) | st.sampled_from(["3-7", "5"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["n", "role", "content", "text", "tool_calls", "drop"]), inner, max_size=4)
    ),
    max_leaves=12,
)


INVENTED = "Zzyzx was never said"


@st.composite
def answers(draw: st.DrawFn, raw: Sequence[JsonDict]) -> str:
    """Sensible plans, the conversation with pieces missing, and any JSON at all."""
    numbers = st.lists(st.integers(0, len(raw)) | st.sampled_from(["1-4", "2-9"]), max_size=12)
    kind = draw(st.sampled_from(["plan", "plan", "conversation", "json"]))
    value: Any
    if kind == "plan":
        value = {"drop": draw(numbers), "summary": draw(texts())}
    elif kind == "conversation":
        kept = [dict(each) for each in raw if draw(st.booleans())]
        for entry in kept:
            if "tool_calls" not in entry and isinstance(entry.get("content"), str) and draw(st.integers(0, 3)) == 0:
                entry["content"] = f"{INVENTED} {draw(st.sampled_from(['', entry['content'][:40]]))} {INVENTED}"
        value = {"prunedConversation": kept, "summary": draw(texts())}
    else:
        value = {draw(st.sampled_from(["drop", "prunedConversation"])): draw(_JSON), "summary": draw(_JSON)}
    answer = draw(st.sampled_from(["", "<b>", "```json\n"])) + json.dumps(value)
    return answer[: draw(st.integers(0, len(answer)) | st.just(len(answer)))]


@given(raw_conversations(repeats=20).filter(lambda each: bool(legal_cuts(parsed(each)))), st.data())
def test_whatever_is_answered_the_list_is_valid_and_holds_no_new_words(
    raw: list[JsonDict], data: st.DataObject
) -> None:
    """P2 to P4: valid, tail and lead byte-equal, ids and calls untouched, each text its original or a line; again
    the same from the store.
    """
    messages = parsed(raw)
    prefix = system_prefix_length(messages)
    covered = data.draw(st.sampled_from(legal_cuts(messages))) - prefix
    pinned = conversation(messages).pinned(covered)
    choices = offered(messages[prefix:], covering(covered, pinned=pinned))
    try:
        wishes = read_answer(data.draw(answers(raw)), messages[prefix:], choices)
    except ValueError:
        return
    compaction = made(raw, wishes, covered=covered)
    upstream = apply(messages, compaction)
    assert broken_promises(messages, upstream) == []
    assert compaction.gone <= wishes.dropped
    assert as_bytes(upstream[:prefix]) == as_bytes(messages[:prefix])
    kept = len(messages) - prefix - covered - (messages[prefix + covered].role == "user")
    tail = [{**raw, "content": "" if raw["content"] is None else raw["content"]} for raw in raw[len(raw) - kept :]]
    assert [message.raw for message in upstream[len(upstream) - kept :]] == tail or not kept
    originals = iter(messages[prefix:])
    for message in upstream[prefix:]:
        own = message.text.partition(FRAME_END + "\n\n")[2] if FRAME_END in message.text else message.text
        if own:
            assert any(_is_from(message, own, original) for original in originals), own[:80]
            assert INVENTED not in own
    assert decode(encode(compaction)) == compaction
    assert as_bytes(apply(messages, compaction)) == as_bytes(upstream)


def _is_from(message: Message, own: str, original: Message) -> bool:
    """Whether a sent message is the original, or a marked short form of it, with its role, calls and id."""
    if (message.role, message.calls, message.call_id) != (original.role, original.calls, original.call_id):
        return False
    if own.startswith("[Old re") or own.endswith("[An image was here; it was removed.]"):
        return True
    # Thinking that stands in the text of an old answer is left out of it.
    texts = (original.text, re.sub(r"<think>.*?</think>", "", original.text, flags=re.DOTALL))
    return own.strip() in map(str.strip, texts)


def prompted(limit_tokens: int) -> list[dict[str, Any]]:
    """The lines of a prompt about 26 tool rounds with an answer and a request each; none where there is no prompt."""
    raw: list[Any] = []
    for each in range(26):
        raw += [calls(f"call_{each:04d}"), result(f"call_{each:04d}", f"r{each} " * 30)]
        raw += [assistant(f"Done with {each}. " + "a " * 30), user(f"Now {each}. " + "u " * 30)]
    messages = parsed(raw)
    sizes = [count(message.text) + 4 for message in messages]
    asked = {"prompt": "Choose.", "values": {}, "request": "The request.", "earlier": "", "messages": messages}
    prompt = pruning_prompt(**asked, sizes=sizes, limit_tokens=limit_tokens, count=count)
    assert count(prompt) <= limit_tokens
    lines = [json.loads(line) for line in prompt.splitlines() if line.startswith("{")]
    assert [(line["n"], line["tokens"]) for line in lines] == [*enumerate(sizes, start=1)] or not prompt
    return lines


@pytest.mark.parametrize("limit_tokens", [2500, 2800, 3100])
def test_many_short_messages_are_shown_by_their_first_words(limit_tokens: int) -> None:
    """Where even short excerpts with ids do not fit: number, size and first words are enough for a plan."""
    lines = prompted(limit_tokens)
    assert len(lines) == 104
    assert not any("ids" in line or "result_of" in line for line in lines)
    assert all(line["content"].startswith("r") for line in lines if line["role"] == "tool")


def test_without_room_for_the_numbers_nobody_is_asked() -> None:
    """ "" says so."""
    assert prompted(1800) == []
