"""Asks a pruning model which messages may go, and holds its answer against the conversation.

An edit plan by message number is asked for; a conversation written anew is read, too, whatever stands around its JSON.
A message may be left out or cut to its head and tail, nothing else: no wish can add a role, a call, an id or a word.
Rounds stay whole, user and assistant keep alternating, and what is protected is never offered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from pydantic_core import from_json

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.excerpts import common_level, excerpt
from litellm_compaction.core.forms import Form, lines_for, size_of
from litellm_compaction.core.messages import (
    JsonObject,
    JsonValue,
    Message,
    canonical_arguments,
    normal_text,
    parse_message,
    render_arguments,
    without_notices,
)
from litellm_compaction.core.prompts import defused, filled, focus_lines
from litellm_compaction.core.rounds import rounds, within_rounds

# Below this nothing is gained that is worth a marker; of a message that is to be shortened so much is shown.
_LEAST_SAVED_CHARS, _SHOWN_RATIO = 80, 0.25
_KEYS = frozenset({"drop", "shorten", "prunedConversation"})
_RANGE = re.compile(r"\s*#?(\d{1,6})\s*(?:(?:-|–|to)\s*#?(\d{1,6}))?\s*")
# Reasoning may hold drafts; more of them than this are noise.
_MAX_OBJECTS = 64
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_REQUEST = "THE REQUEST BEING WORKED ON (it stays):"
_EARLIER = "WHAT WAS LEFT OUT BEFORE (it stays):"
_MESSAGES = "MESSAGES:"
_REMINDER = "END OF THE DATA. Now write the JSON object."
_ARGUMENTS_CHARS = 100
# However many messages there are, most of an edit plan is ranges.
_PLAN_TOKENS, _TOKENS_PER_MESSAGE, _MAX_PLAN_TOKENS = 256, 12, 768
# Tool results give way first; if there are many short messages, their sizes and first words say enough to choose by.
_WEIGHT, _LEAST_TOKENS, _LEAST_BRIEF_TOKENS = 4, 16, 3


class Wishes(NamedTuple):
    """Positions after the prefix to be left out and to be shortened, and what of it all still matters."""

    dropped: frozenset[int] = frozenset()
    shortened: frozenset[int] = frozenset()
    summary: str = ""


def offered(rest: Sequence[Message], compaction: Compaction) -> list[int]:
    """The positions that a pruning model may choose from: covered, and neither replaced, pinned nor left out.

    `rest` are the messages after the leading system ones, here and below.
    """
    stays = {*compaction.pinned, *compaction.gone}
    return [at for at in _span(compaction) if at not in stays and not (rest[at].is_system or rest[at].is_synthetic)]


def pruned(rest: Sequence[Message], compaction: Compaction, choices: Collection[int], wishes: Wishes) -> Compaction:
    """The compaction with as much of the wishes as leaves a valid conversation; what it leaves out already stays out.

    A stretch goes if every message in it is to go (`_units`). Of anything smaller a result becomes a line, a
    text leaves a line in its place, and a call stays.
    """
    span = _span(compaction)
    wanted = {*compaction.gone.intersection(span), *wishes.dropped.intersection(choices)}
    dropped = {at for unit in _units(rest, span, wanted) if wanted.issuperset(unit) for at in unit}
    shrinking = {span.start + at for at in lines_for(rest[span.start : span.stop])}
    forms = {each.position: each for each in compaction.forms}
    lines = {at for at, each in forms.items() if each.how == "line"}
    new_lines = {at for at in (wanted - dropped) & shrinking - lines if rest[at].role == "tool"}
    forms.update((at, Form(at, "line", size_of(rest[at]))) for at in new_lines)
    for at in {*wanted, *wishes.shortened}.intersection(choices) - lines - new_lines:
        is_line = at in wanted
        chars = 0 if is_line else int(len(normal_text(rest[at])) * _SHOWN_RATIO)
        is_text = rest[at].role in ("user", "assistant") and not rest[at].calls if is_line else not rest[at].other_parts
        if is_text and len(normal_text(rest[at])) - chars >= _LEAST_SAVED_CHARS:
            forms[at] = Form(at, chars)
    forms.update((at, Form(at, "gone")) for at in dropped)
    return replace(compaction, forms=tuple(sorted(forms.values())))


def _span(compaction: Compaction) -> range:
    return range(compaction.start, compaction.covered_messages)


def _units(rest: Sequence[Message], span: range, wanted: Collection[int]) -> Iterator[range]:
    """The stretches that can go without putting two of one role next to each other.

    A tool round that an assistant's message follows; a whole exchange, from a user's message to the next one; and all
    up to the first message that is not wanted away, since the record stands before it in a user's message.
    """
    within = within_rounds(rest)
    stays = next((at for at in span if at not in wanted), span.stop)
    while span.start < stays < span.stop and (stays in within or rest[stays].role not in ("user", "assistant")):
        stays -= 1
    yield range(span.start, stays)
    users = [at for at in span if rest[at].role == "user" and at not in within]
    for each in rounds(rest):
        if span.start <= each.start and each.end < span.stop and rest[each.end].role == "assistant":
            yield range(each.start, each.end)
    for begin, end in pairwise(sorted({span.start, *users, span.stop})):
        # The messages after the covered part may be edited by their client.
        if end < span.stop or (rest[end - 1].role == "assistant" and not rest[end - 1].calls):
            yield range(begin, end)


def decide(
    answer: str, rest: Sequence[Message], compaction: Compaction, choices: Sequence[int], *, prompt: str
) -> tuple[Compaction, str] | None:
    """The compaction that an answer makes of one, and what it says of the part that goes; None if nothing changes.

    Arguments as in `read_answer`.
    """
    try:
        wishes = read_answer(answer, rest, choices, prompt=prompt)
    except ValueError:
        return None
    done = pruned(rest, compaction, choices, wishes)
    return None if done == compaction else (done, wishes.summary)


def read_answer(answer: str, rest: Sequence[Message], choices: Sequence[int], *, prompt: str = "") -> Wishes:
    """The wishes in a model's answer.

    Args:
        answer: without its reasoning; anything may stand around the JSON.
        rest: the messages after the leading system ones.
        choices: the offered positions, in the order in which they were numbered, from 1.
        prompt: the question: an example in it that comes back is no answer.

    Raises:
        ValueError: there are none, or it names a role, a call or a message that does not exist; without any text of
            the answer.
    """
    found, is_cut = _object(answer, prompt)
    summary = found.get("summary") or ""
    read = _from_conversation if "prunedConversation" in found else _from_plan
    wishes = read(found, rest, choices, is_cut)
    if not isinstance(summary, str) or not (wishes.dropped or wishes.shortened):
        raise ValueError("the summary is not a text, or nothing is to go")
    wishes = wishes._replace(summary="\n".join(filter(None, (summary.strip(), wishes.summary))))
    if len(wishes.dropped) == len(choices) and not wishes.summary:
        raise ValueError("everything is to go, without a summary")
    return wishes


def _object(answer: str, prompt: str) -> tuple[JsonObject, bool]:
    """The last JSON object that is an answer, drafts may stand before it; and if the answer was cut in it."""
    whole: JsonObject = {}
    begun: JsonObject = {}
    at = answer.find("{")
    for _ in range(_MAX_OBJECTS):
        if at < 0:
            break
        try:
            value, end = json.JSONDecoder().raw_decode(answer, at)
        except (ValueError, RecursionError):
            value, end = {}, at + 1
            begun = begun or _begun(answer[at:])
        if _KEYS.intersection(value) and answer[at:end] not in prompt:
            whole = value
        at = answer.find("{", end)
    if not whole and not begun:
        raise ValueError("no JSON object with an edit plan")
    return whole or begun, not whole


def _begun(text: str) -> JsonObject:
    """A cut JSON object as far as it goes, without the last item, which may be another one than was meant."""
    try:
        value: JsonValue = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}
    if not isinstance(value, dict) or not _KEYS.intersection(value):
        return {}
    last = next(reversed(value))
    items = value[last]
    return {**value, last: items[:-1]} if isinstance(items, list) else value


def _from_plan(plan: JsonObject, rest: Sequence[Message], choices: Sequence[int], is_cut: bool) -> Wishes:
    """The messages that an edit plan names, by number, by range ("3-7"), or in an object with a number."""

    def named(key: str) -> set[int]:
        items = plan.get(key) or []
        if not isinstance(items, list | dict):
            raise ValueError(f"`{key}` is not a list")  # noqa: TRY004 - one error type for every bad shape
        return {at for item in items for at in choices[_places(item)]}

    dropped = named("drop")
    shortened = named("shorten") - dropped
    # A model that drops a call means its results too, but for those that are to stay in part.
    results = {at for each in rounds(rest) for at, made in each.results.items() if made.at in dropped}
    return Wishes(frozenset(dropped | (results & set(choices) - shortened)), frozenset(shortened))


def _places(item: JsonValue) -> slice:
    if isinstance(item, Mapping):
        item = next((item[key] for key in ("n", "number", "message") if key in item), None)
    found = None if isinstance(item, bool) else _RANGE.fullmatch(str(item))
    return slice(max(int(found[1]) - 1, 0), int(found[2] or found[1])) if found else slice(0)


def _from_conversation(answer: JsonObject, rest: Sequence[Message], choices: Sequence[int], is_cut: bool) -> Wishes:
    """The messages that a conversation written anew leaves out, by a walk along the original.

    A message that stands in it stays. One in other words is a note about what goes: its words join the summary. Nothing
    is known of messages after a cut.
    """
    entries = answer["prunedConversation"]
    if not isinstance(entries, list) or not entries:
        raise ValueError("`prunedConversation` is not a list of messages")
    texts = [_identity(message) for message in rest]
    # A model that writes down all that stays may name those that it was not asked about.
    stays = {texts[at] for at in set(range(len(rest))).difference(choices)}
    left, kept, notes = list(choices), set[int](), list[str]()
    for entry in entries:
        if not isinstance(entry, Mapping) or entry.get("role") not in _ROLES:
            raise ValueError("`prunedConversation` holds something that is no message")
        message = parse_message(entry)
        found = _identity(message)
        place = next((at for at in left if texts[at] == found), None)
        if place is not None:
            kept.add(place)
            left = left[left.index(place) + 1 :]
        elif not (message.is_system or found in stays):
            if message.calls or message.call_id or any(texts[at] == found for at in choices):
                raise ValueError("`prunedConversation` holds a message that the conversation does not have there")
            notes.append(message.text.strip())
    known = set(choices).difference(left) if is_cut else set(choices)
    return Wishes(frozenset(known - kept), summary="\n".join(filter(None, notes)))


def _identity(message: Message) -> tuple[object, ...]:
    calls = tuple((call.id, call.name, canonical_arguments(call.arguments)) for call in message.calls)
    return (message.role, message.call_id, normal_text(message), calls)


def plan_tokens(messages: int) -> int:
    """The bound on an edit plan for so many messages, without its summary; a conversation written anew is longer."""
    return min(_PLAN_TOKENS + _TOKENS_PER_MESSAGE * messages, _MAX_PLAN_TOKENS)


def roomy_answer_tokens(answer_tokens: int, *, spare_tokens: int, offered_tokens: int) -> int:
    """The bound on an answer that may be all that is offered once more, if the prompt leaves so much to spare.

    A model that only thinks is asked a second time with twice the room, which has to fit as well.
    """
    return answer_tokens + min(max(spare_tokens - answer_tokens, 0) // 2, offered_tokens)


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
    """One user message that asks what may go; "" if not even short excerpts of the messages fit.

    Args:
        prompt: the instruction, with placeholders.
        values: for the placeholders.
        request: the request being worked on, already short; "" for none.
        earlier: an earlier pruning's words about the messages that it left out; "" for none.
        focus: the topic that is kept in more detail; "" for none.
        messages: n, as they would be sent; they are numbered from 1.
        sizes: n, tokens.
        limit_tokens: bound on the whole.
        count: tokens of a text, for the pruning model.
    """
    head = [filled(prompt, values), "", *focus_lines(focus)]
    head += [_REQUEST, defused(request), ""] if request else []
    head += [_EARLIER, defused(earlier), ""] if earlier else []
    room_tokens = limit_tokens - count("\n".join([*head, _MESSAGES, "", _REMINDER]))
    texts = [defused(without_notices(message.text).strip()) for message in messages]
    tokens = [count(text) for text in texts]
    weights = [1 if message.role == "tool" else _WEIGHT for message in messages]
    level = max(common_level(tokens, weights, max(room_tokens, 0)), _LEAST_TOKENS)
    while level >= _LEAST_BRIEF_TOKENS:
        brief = level < _LEAST_TOKENS
        shown = (
            _opening(text, size, level * weight) if brief else excerpt(text, level * weight, count)
            for text, size, weight in zip(texts, tokens, weights, strict=True)
        )
        rows = enumerate(zip(messages, sizes, shown, strict=True), start=1)
        lines = "\n".join(_line(number, *row, brief=brief) for number, row in rows)
        # Quoting and the other fields come on top of the texts.
        if count(lines) <= room_tokens:
            return "\n".join([*head, _MESSAGES, lines, "", _REMINDER])
        level -= max(level // 5, 1)
    return ""


def _opening(text: str, tokens: int, limit_tokens: int) -> str:
    return text if tokens <= limit_tokens else f"{text[: len(text) * limit_tokens // tokens]}…"


def _line(number: int, message: Message, size: int, text: str, *, brief: bool) -> str:
    """One message as JSON; a brief one leaves the ids out, which only a conversation written anew would need."""
    fields = {
        "calls": [
            f"{call.name}({defused(render_arguments(call.arguments))[:_ARGUMENTS_CHARS]})" for call in message.calls
        ],
        "ids": [] if brief else [defused(call.id) for call in message.calls],
        "result_of": "" if brief else defused(message.call_id),
        "attached": list(message.other_parts),
    }
    shown = {"n": number, "role": message.role, "tokens": size, "content": text}
    return json.dumps({**shown, **{key: value for key, value in fields.items() if value}}, ensure_ascii=False)
