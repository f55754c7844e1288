"""What a pruning model says, read: an edit plan by message number, or the whole conversation once more.

Pure, and tolerant of everything around the JSON; what is in it is only ever a wish about messages that exist. Called by
the engine, before `pruning` holds it against the original.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from litellm_compaction.core.chain import canonical_arguments, normal_text
from litellm_compaction.core.messages import JsonObject, JsonValue, Message, parse_message, round_end
from litellm_compaction.core.pruned import is_excerpt
from litellm_compaction.core.pruning import Pruning, Wishes, verified

_KEYS = frozenset({"drop", "shorten", "prunedConversation"})
_NUMBER_KEYS = ("n", "number", "message")
_RANGE = re.compile(r"\s*#?(\d{1,6})\s*(?:(?:-|–|to)\s*#?(\d{1,6}))?\s*")
# Reasoning may hold drafts; more of them than this are noise.
_MAX_OBJECTS = 64


class Decided(NamedTuple):
    """What is done to a conversation, and what the model says of the part that goes."""

    pruning: Pruning
    summary: str


def decide(
    answer: str, rest: Sequence[Message], span: range, choices: Sequence[int], before: Pruning, *, prompt: str
) -> Decided | None:
    """What comes of a model's answer; None where it is no answer, or changes nothing.

    Args:
        answer: without its reasoning; anything.
        rest: the messages after the leading system ones.
        span: the positions that are covered and not replaced.
        choices: what was offered, in the order in which it was numbered.
        before: what an earlier pruning has done.
        prompt: what was asked.
    """
    try:
        wishes = read_answer(answer, rest, choices, prompt=prompt)
    except ValueError:
        return None
    pruning = verified(rest, span, choices, wishes, before)
    return None if pruning == before else Decided(pruning, wishes.summary)


def read_answer(answer: str, rest: Sequence[Message], choices: Sequence[int], *, prompt: str = "") -> Wishes:
    """The wishes in a model's answer.

    Args:
        answer: without its reasoning; the JSON may be fenced, and words may stand around it.
        rest: the messages after the leading system ones.
        choices: their positions in the order in which they were numbered, from 1.
        prompt: what was asked: an example in it that comes back is no answer.

    Raises:
        ValueError: there are none, or it names a role, a call or a message that does not exist; without any text of
            the answer.
    """
    found = _object(answer, prompt)
    summary = found.get("summary")
    if summary is not None and not isinstance(summary, str):
        raise ValueError("the summary is not a text")
    wishes = (
        _from_conversation(found, rest, choices) if "prunedConversation" in found else _from_plan(found, rest, choices)
    )
    if not wishes.dropped and not wishes.shortened:
        raise ValueError("nothing is to go")
    if len(wishes.dropped) == len(choices) and not (summary or "").strip():
        raise ValueError("everything is to go, without a summary")
    return Wishes(dropped=wishes.dropped, shortened=wishes.shortened, summary=(summary or "").strip())


def _object(answer: str, prompt: str) -> JsonObject:
    """The last JSON object that is an answer; drafts may stand before it."""
    decoder = json.JSONDecoder()
    found: JsonObject | None = None
    at = answer.find("{")
    for _ in range(_MAX_OBJECTS):
        if at < 0:
            break
        try:
            value, end = decoder.raw_decode(answer, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            if isinstance(value, dict) and _KEYS.intersection(value) and answer[at:end] not in prompt:
                found = value
        at = answer.find("{", end)
    if found is None:
        raise ValueError("no JSON object with an edit plan")
    return found


def _from_plan(plan: JsonObject, rest: Sequence[Message], choices: Sequence[int]) -> Wishes:
    drop, shorten = plan.get("drop") or [], plan.get("shorten") or []
    if not isinstance(drop, list):
        raise ValueError("`drop` is not a list")  # noqa: TRY004 - one error type for every bad shape
    if isinstance(shorten, Mapping):
        shorten = [{"n": number, "text": text} for number, text in shorten.items()]
    if not isinstance(shorten, list):
        raise ValueError("`shorten` is not a list")  # noqa: TRY004
    dropped = {at for each in drop for at in _positions(each, choices)}
    shortened: dict[int, str] = {}
    for each in shorten:
        text = each.get("text") if isinstance(each, Mapping) else None
        if isinstance(each, Mapping) and isinstance(text, str):
            shortened.update((at, text) for at in _positions(each, choices)[:1] if at not in dropped)
    # Who drops a call means its results too, but for those that are to stay in part.
    results = {of for at in dropped if rest[at].calls for of in range(at + 1, round_end(rest, at))}
    return Wishes(dropped=frozenset(dropped | (results & set(choices) - set(shortened))), shortened=shortened)


def _positions(value: JsonValue, choices: Sequence[int]) -> list[int]:
    """The positions that a number, a range ("3-7") or an object with a number means; none for anything else."""
    if isinstance(value, Mapping):
        value = next((value[key] for key in _NUMBER_KEYS if key in value), None)
    if isinstance(value, bool):
        return []
    if isinstance(value, int):
        return [choices[value - 1]] if 0 < value <= len(choices) else []
    found = _RANGE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return []
    first, last = int(found[1]), int(found[2] or found[1])
    return [choices[number - 1] for number in range(max(first, 1), min(last, len(choices)) + 1)]


def _from_conversation(answer: JsonObject, rest: Sequence[Message], choices: Sequence[int]) -> Wishes:
    """What is missing from the conversation, or shorter in it, by a walk along the original."""
    kept = answer["prunedConversation"]
    if not isinstance(kept, list) or not kept:
        raise ValueError("`prunedConversation` is not a list of messages")
    found: set[int] = set()
    shortened: dict[int, str] = {}
    left = list(choices)
    # Nobody has asked about these; a model that writes down all that stays may name them.
    stays = {_identity(rest[at]) for at in set(range(len(rest))).difference(choices)}
    for entry in kept:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("role"), str):
            raise ValueError("`prunedConversation` holds something that is no message")  # noqa: TRY004
        message, numbered = parse_message(entry), _positions(entry, choices)
        place = next(
            (at for at in numbered or left if at in left and _is_same(message, rest[at], bool(numbered))), None
        )
        if place is None and _identity(message) in stays:
            continue
        if place is None:
            raise ValueError("`prunedConversation` holds a message that the conversation does not have")
        left = left[left.index(place) + 1 :]
        found.add(place)
        text = message.text.strip()
        if text != normal_text(rest[place]):
            shortened[place] = text
    return Wishes(dropped=frozenset(choices) - found, shortened=shortened)


def _is_same(message: Message, original: Message, numbered: bool) -> bool:
    """Whether a message is the original or a shorter form of it: by its number, its calls, its id, or its words."""
    if message.role != original.role or message.is_system:
        return False
    if message.calls and _calls(message) != _calls(original):
        return False
    if message.call_id and message.call_id != original.call_id:
        return False
    if numbered or message.calls or message.call_id:
        return True
    text = normal_text(original)
    return not original.calls and (message.text.strip() == text or is_excerpt(text, message.text))


def _identity(message: Message) -> tuple[str, str, str, tuple[tuple[str, str, str], ...]]:
    return (message.role, message.call_id, normal_text(message), tuple(_calls(message)))


def _calls(message: Message) -> list[tuple[str, str, str]]:
    return [(call.id, call.name, canonical_arguments(call.arguments)) for call in message.calls]
