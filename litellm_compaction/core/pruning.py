"""Asks a pruning model which messages may go, and holds its answer against the conversation.

An edit plan by message number is asked for; a conversation written anew is read, too. A message may be left out, or a
line stands in a result's place: no wish can add a role, a call, an id or a word. Rounds stay whole, user and assistant
alternate, and what is protected is never offered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from pydantic_core import from_json

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.forms import common_level, ends, in_order, lines_for
from litellm_compaction.core.messages import (
    JsonObject,
    JsonValue,
    Message,
    canonical_arguments,
    normal_text,
    parse_message,
    render_arguments,
    rounds,
    within_rounds,
    without_notices,
)
from litellm_compaction.core.prompts import data_lines, defused, filled

_KEYS = frozenset({"drop", "prunedConversation"})
_RANGE = re.compile(r"\s*#?(\d{1,6})\s*(?:(?:-|–|to)\s*#?(\d{1,6}))?\s*")
# Reasoning may hold drafts; more of them than this are noise.
_MAX_OBJECTS = 64
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_REQUEST, _EARLIER = "THE REQUEST BEING WORKED ON (it stays):", "WHAT WAS LEFT OUT BEFORE (it stays):"
_REMINDER = "END OF THE DATA. Now write the JSON object."
_ARGUMENTS_CHARS = 100
# Tool results give way first; if there are many short messages, their sizes and first words say enough to choose by.
_WEIGHT, _USEFUL_TOKENS, _LEAST_TOKENS = 4, 16, 3


class Wishes(NamedTuple):
    """Positions after the prefix to be left out, and what of it all still matters."""

    dropped: frozenset[int] = frozenset()
    summary: str = ""


def offered(rest: Sequence[Message], compaction: Compaction) -> list[int]:
    """The positions that a pruning model may choose from: covered, and neither replaced, pinned nor left out.

    `rest` are the messages after the leading system ones, here and below.
    """
    stays = {*compaction.pinned, *compaction.gone, *([compaction.start] if compaction.covered_part else [])}
    span = range(compaction.start, compaction.covered_messages)
    return [at for at in span if at not in stays and not (rest[at].is_system or rest[at].is_synthetic)]


def pruned(rest: Sequence[Message], compaction: Compaction, choices: Collection[int], wishes: Wishes) -> Compaction:
    """The compaction with as much of the wishes as leaves a valid conversation; what it leaves out already stays out.

    A whole stretch goes (`_units`). Of less than that a result or attached data becomes a line, and all else stays.
    """
    span = range(compaction.start, compaction.covered_messages)
    wanted = {*compaction.gone.intersection(span), *wishes.dropped.intersection(choices)}
    dropped = {at for unit in _units(rest, span, wanted, compaction.gone) for at in unit}
    lines = wanted.intersection(choices, (span.start + at for at in lines_for(rest[span.start : span.stop]))) - dropped
    forms = dict(compaction.forms) | dict.fromkeys(lines, "line") | dict.fromkeys(dropped, "gone")
    return replace(compaction, forms=in_order(forms))


def _units(rest: Sequence[Message], span: range, wanted: Collection[int], gone: Collection[int]) -> Iterator[range]:
    """The stretches that can go without putting two of one role next to each other: what follows begins like them.

    Before the first of all stands the record, in a user's message, and behind it anything may follow. Those that are
    `gone` begin and end none.
    """
    within, end = within_rounds(rest).union(gone), span.stop
    # The messages after the covered part may be edited by their client.
    last = "user" if rest[end - 1].role == "assistant" and not rest[end - 1].calls else ""
    begun = dict.fromkeys(("user", "assistant", ""), span.start)
    for at in (*span, end):
        role = rest[at].role if at < end else last
        if at not in within and role in begun:
            yield range(begun[role], at)
            begun = {each: start for each, start in begun.items() if start <= begun[role]}
        if at not in wanted:
            begun = {}
        elif at not in within and role in ("user", "assistant"):
            begun.setdefault(role, at)


def read_answer(answer: str, rest: Sequence[Message], choices: Sequence[int], *, prompt: str = "") -> Wishes:
    """The wishes in a model's answer without its reasoning; anything may stand around its JSON.

    `choices` are the offered positions as they were numbered, from 1. An example in `prompt`, the question, that comes
    back is no answer. A ValueError, without any text of the answer, says that there are no wishes, or that it names a
    role, a call or a message that does not exist.
    """
    wish, is_cut = _object(answer, prompt)
    summary = wish.get("summary") or ""
    if "prunedConversation" in wish:
        wishes = _from_conversation(wish["prunedConversation"], rest, choices, is_cut=is_cut)
    else:
        wishes = _from_plan(wish, rest, choices)
    if not isinstance(summary, str) or not wishes.dropped:
        raise ValueError("the summary is not a text, or nothing is to go")
    wishes = wishes._replace(summary="\n".join(filter(None, (summary.strip(), wishes.summary))))
    if len(wishes.dropped) == len(choices) and not wishes.summary:
        raise ValueError("everything is to go, without a summary")
    return wishes


def _object(answer: str, prompt: str) -> tuple[JsonObject, bool]:
    """The last JSON object that is an answer, drafts may stand before it; else the first that was cut, and True."""
    objects: list[tuple[JsonObject, bool]] = []
    end = 0
    for at in (opening.start() for opening in islice(re.finditer(r"\{", answer), _MAX_OBJECTS)):
        if at >= end:
            try:
                value, end = json.JSONDecoder().raw_decode(answer, at)
                objects += [(value, False)] if _KEYS.intersection(value) and answer[at:end] not in prompt else []
            except (ValueError, RecursionError):
                objects += [(value, True)] if _KEYS.intersection(value := _begun(answer[at:])) else []
    whole = [each for each in objects if not each[1]]
    if not objects:
        raise ValueError("no JSON object with an edit plan")
    return whole[-1] if whole else objects[0]


def _begun(text: str) -> JsonObject:
    """A cut JSON object; the last item of a list may be another one than was meant."""
    try:
        value: JsonObject = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return {key: items[:-1] if isinstance(items, list) else items for key, items in value.items()}


def _from_plan(plan: JsonObject, rest: Sequence[Message], choices: Sequence[int]) -> Wishes:
    """The messages that an edit plan names, by number, by range ("3-7"), or in an object with a number."""
    items = plan.get("drop") or []
    if not isinstance(items, list | dict):
        raise ValueError("`drop` is not a list")  # noqa: TRY004 - one error type for every bad shape
    dropped = {at for item in items for at in choices[_places(item)]}
    # A model that drops a call means its results too.
    results = {at for each in rounds(rest) for at, made in each.results.items() if made.at in dropped}
    return Wishes(frozenset(dropped | results.intersection(choices)))


def _places(item: JsonValue) -> slice:
    if isinstance(item, Mapping):
        item = next((item[key] for key in ("n", "number", "message") if key in item), None)
    numbers = _RANGE.fullmatch(str(item))
    return slice(max(int(numbers[1]) - 1, 0), int(numbers[2] or numbers[1])) if numbers else slice(0)


def _from_conversation(entries: JsonValue, rest: Sequence[Message], choices: Sequence[int], *, is_cut: bool) -> Wishes:
    """The messages that a conversation written anew leaves out, by a walk along the original, up to a cut.

    A message in other words is a note about what goes: its words join the summary.
    """
    if not isinstance(entries, list) or not entries:
        raise ValueError("`prunedConversation` is not a list of messages")
    originals = [_identity(message) for message in rest]
    # A model that writes down all that stays may name those that it was not asked about.
    stays = {originals[at] for at in set(range(len(rest))).difference(choices)}
    left, staying, notes = list(choices), set[int](), list[str]()
    for entry in entries:
        if not isinstance(entry, Mapping) or entry.get("role") not in _ROLES:
            raise ValueError("`prunedConversation` holds something that is no message")
        message = parse_message(entry)
        identity = _identity(message)
        if (place := next((at for at in left if originals[at] == identity), None)) is not None:
            staying.add(place)
            left = left[left.index(place) + 1 :]
        elif message.is_system or identity in stays:
            continue
        elif message.calls or message.call_id or identity in originals:
            raise ValueError("`prunedConversation` holds a message that the conversation does not have there")
        else:
            notes.append(message.text.strip())
    read = set(choices).difference(left if is_cut else ())
    return Wishes(frozenset(read - staying), summary="\n".join(filter(None, notes)))


def _identity(message: Message) -> tuple[object, ...]:
    calls = tuple((call.id, call.name, canonical_arguments(call.arguments)) for call in message.calls)
    return (message.role, message.call_id, normal_text(message), calls)


def pruning_prompt(
    *,
    prompt: str,
    values: Mapping[str, int],
    request: str,
    earlier: str,
    focus: str = "",
    messages: Sequence[Message],
    sizes: Sequence[int],
    limit_tokens: int,
    count: Callable[[str], int],
) -> str:
    """One user message that asks what may go; "" if not even the beginnings of the messages fit in `limit_tokens`.

    `prompt` has placeholders for `values`; `request`, `earlier` (words about what was left out before) and `focus` are
    short, "" for none. The n `messages` are numbered from 1, `sizes` are their tokens, `count` is the pruning model's.
    """
    data = data_lines(focus, (_REQUEST, request), (_EARLIER, earlier))
    head = "\n".join([filled(prompt, values), "", *data, "MESSAGES:\n"])
    room_tokens = limit_tokens - count(f"{head}\n\n{_REMINDER}")
    texts = [defused(without_notices(message.text).strip()) for message in messages]
    tokens = [count(text) for text in texts]
    weights = [1 if message.role == "tool" else _WEIGHT for message in messages]
    level = max(common_level(tokens, weights, max(room_tokens, 0)), _USEFUL_TOKENS)
    while level >= _LEAST_TOKENS:
        rows = enumerate(zip(messages, sizes, texts, tokens, weights, strict=True), start=1)
        lines = "\n".join(_line(number, level, *row) for number, row in rows)
        # Quoting and the other fields come on top of the texts.
        if count(lines) <= room_tokens:
            return f"{head}{lines}\n\n{_REMINDER}"
        level -= max(level // 5, 1)
    return ""


def _line(number: int, level: int, message: Message, size: int, text: str, tokens: int, weight: int) -> str:
    """One message as JSON; a brief one leaves the ids out, which only a conversation written anew would need."""
    is_brief, most_chars = level < _USEFUL_TOKENS, len(text) * level * weight // max(tokens, 1)
    calls = message.calls
    fields = {
        "calls": [f"{call.name}({defused(render_arguments(call.arguments))[:_ARGUMENTS_CHARS]})" for call in calls],
        "ids": [] if is_brief else [defused(call.id) for call in calls],
        "result_of": "" if is_brief else defused(message.call_id),
        "attached": list(message.other_parts),
    }
    content = f"{text[:most_chars]}…" if is_brief and len(text) > most_chars else ends(text, most_chars)
    shown = {"n": number, "role": message.role, "tokens": size, "content": content}
    return json.dumps({**shown, **{key: value for key, value in fields.items() if value}}, ensure_ascii=False)
