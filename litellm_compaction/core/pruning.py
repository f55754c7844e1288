"""Asks a pruning model which messages may go, and holds its answer against the conversation.

An edit plan by message number is asked for, since small models are slow and poor at writing a conversation anew; an
answer that does so is read, too, whatever stands around its JSON. A message may be left out or cut to its head and
tail, nothing else: no wish can add a role, a call, an id or a word. Rounds stay whole, user and assistant keep
alternating, and what is protected is never offered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pydantic_core import from_json

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.excerpts import common_level, excerpt
from litellm_compaction.core.forms import Form, size_of, stubs
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
from litellm_compaction.core.rounds import NO_RESPONSE, rounds, within_rounds

# Below this nothing is gained that is worth a marker.
_LEAST_SAVED_CHARS = 80
# Of a message that is to be shortened at most so much is shown, and so much if nothing says how much.
_MOST_SHOWN_RATIO = 0.5
_SHOWN_RATIO = 0.25
_KEYS = frozenset({"drop", "shorten", "prunedConversation"})
_NUMBER_KEYS = ("n", "number", "message")
_RANGE = re.compile(r"\s*#?(\d{1,6})\s*(?:(?:-|–|to)\s*#?(\d{1,6}))?\s*")
# Reasoning may hold drafts; more of them than this are noise.
_MAX_OBJECTS = 64
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_REQUEST = "THE REQUEST BEING WORKED ON (it stays):"
_EARLIER = "WHAT WAS LEFT OUT BEFORE (it stays):"
_MESSAGES = "MESSAGES:"
_REMINDER = "END OF THE DATA. Now write the JSON object."
_ARGUMENTS_CHARS = 200
_BRIEF_ARGUMENTS_CHARS = 60
# An edit plan's numbers and quotes, beside the summary. However many messages there are, most of a plan is ranges; its
# room is taken from the question.
_PLAN_TOKENS = 256
_TOKENS_PER_MESSAGE = 12
_MAX_PLAN_TOKENS = 768
# Tool results give way first, as for a summary.
_WEIGHT = 4
_LEAST_TOKENS = 16
# If there are many short messages, their sizes and first words say enough to choose by.
_LEAST_BRIEF_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Positions after the prefix to be left out, the characters to be shown of others, and what of it still matters."""

    dropped: frozenset[int] = frozenset()
    shortened: Mapping[int, int] = field(default_factory=dict)
    summary: str = ""


def offered(rest: Sequence[Message], compaction: Compaction) -> list[int]:
    """The positions that a pruning model may choose from: covered, and neither replaced, pinned nor left out.

    `rest` are the messages after the leading system ones, here and below.
    """
    stays = {*compaction.pinned, *compaction.gone}
    return [at for at in _span(compaction) if at not in stays and not (rest[at].is_system or rest[at].is_synthetic)]


def pruned(rest: Sequence[Message], compaction: Compaction, choices: Collection[int], wishes: Wishes) -> Compaction:
    """The compaction with as much of the wishes as leaves a valid conversation; what it leaves out already stays out.

    A stretch goes if every message in it is to go (`_units`). Of anything smaller a result becomes a stub, a
    text leaves a line in its place, and a call stays.
    """
    span = _span(compaction)
    wanted = {*compaction.gone.intersection(span), *wishes.dropped.intersection(choices)}
    dropped = {at for unit in _units(rest, span, wanted) if wanted.issuperset(unit) for at in unit}
    kept = wanted - dropped
    shrinking = {span.start + at for at in stubs(rest[span.start : span.stop])}
    forms = {each.position: each for each in compaction.forms}
    lines_now = {at for at, each in forms.items() if each.how == "line"}
    new_lines = {at for at in kept & shrinking - lines_now if rest[at].role == "tool"}
    forms.update((at, Form(at, "line", size_of(rest[at]))) for at in new_lines)
    lines = {at: 0 for at in kept if rest[at].role in ("user", "assistant") and not rest[at].calls}
    for at, chars in {**wishes.shortened, **lines}.items():
        if at in choices and at not in lines_now | new_lines and _can_shrink(rest[at], chars):
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


def _can_shrink(message: Message, chars: int) -> bool:
    """Returns True if cutting the message to its head and tail saves something, and there is nothing but text."""
    saved = len(normal_text(message)) - chars
    return saved >= _LEAST_SAVED_CHARS and not (chars and message.other_parts)


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
    if not isinstance(summary, str):
        raise ValueError("the summary is not a text")  # noqa: TRY004 - one error type for every bad shape
    if "prunedConversation" in found:
        wishes = _from_conversation(found["prunedConversation"], rest, choices, is_cut=is_cut)
    else:
        wishes = _from_plan(found, rest, choices)
    summary = "\n".join(filter(None, (summary.strip(), wishes.summary)))
    if not wishes.dropped and not wishes.shortened:
        raise ValueError("nothing is to go")
    if len(wishes.dropped) == len(choices) and not summary:
        raise ValueError("everything is to go, without a summary")
    return replace(wishes, summary=summary)


def _object(answer: str, prompt: str) -> tuple[JsonObject, bool]:
    """The last JSON object that is an answer, drafts may stand before it; and if the answer was cut in it."""
    found: JsonObject | None = None
    unread: list[str] = []
    at = answer.find("{")
    for _ in range(_MAX_OBJECTS):
        if at < 0:
            break
        try:
            value, end = json.JSONDecoder().raw_decode(answer, at)
        except (ValueError, RecursionError):
            unread.append(answer[at:])
            end = at + 1
        else:
            found = value if _KEYS.intersection(value) and answer[at:end] not in prompt else found
        at = answer.find("{", end)
    if found is not None:
        return found, False
    for begun in unread:
        value = _begun(begun) if begun not in prompt else {}
        if _KEYS.intersection(value):
            return value, True
    raise ValueError("no JSON object with an edit plan")


def _begun(text: str) -> JsonObject:
    """A cut JSON object as far as it goes. What may be another item than was meant goes."""
    try:
        value: JsonValue = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}
    if not isinstance(value, dict) or not value:
        return {}
    last = next(reversed(value))
    items = value[last]
    if isinstance(items, list):
        value[last] = items[:-1]
    elif isinstance(items, dict):
        value[last] = dict(list(items.items())[:-1])
    return value


def _from_plan(plan: JsonObject, rest: Sequence[Message], choices: Sequence[int]) -> Wishes:
    drop, shorten = plan.get("drop") or [], plan.get("shorten") or []
    if not isinstance(drop, list):
        raise ValueError("`drop` is not a list")  # noqa: TRY004 - one error type for every bad shape
    if isinstance(shorten, Mapping):
        shorten = [{"n": number, "text": text} for number, text in shorten.items()]
    if not isinstance(shorten, list):
        raise ValueError("`shorten` is not a list")  # noqa: TRY004
    dropped = {at for each in drop for at in _positions(each, choices)}
    shortened: dict[int, int] = {}
    for each in shorten:
        text = each.get("text") if isinstance(each, Mapping) else None
        for at in _positions(each, choices):
            if at not in dropped:
                shortened[at] = _shown_chars(rest[at], text if isinstance(text, str) else None)
    # A model that drops a call means its results too, but for those that are to stay in part.
    results = {at for each in rounds(rest) for at, made in each.results.items() if made.at in dropped}
    return Wishes(dropped=frozenset(dropped | (results & set(choices) - set(shortened))), shortened=shortened)


def _shown_chars(message: Message, text: str | None = None) -> int:
    """The part of a message that is shown if a model gives it so much text; its words are its own and go nowhere."""
    chars = len(normal_text(message))
    return int(chars * _SHOWN_RATIO) if text is None else min(len(text), int(chars * _MOST_SHOWN_RATIO))


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


def _from_conversation(kept: JsonValue, rest: Sequence[Message], choices: Sequence[int], *, is_cut: bool) -> Wishes:
    """The messages that a conversation written anew leaves out, by a walk along the original.

    A message that stands in it stays. One in other words is a note about what goes: its words join the summary. Nothing
    is known of messages after a cut.
    """
    if not isinstance(kept, list) or not kept:
        raise ValueError("`prunedConversation` is not a list of messages")
    left, found, notes = list(choices), set[int](), list[str]()
    # A model that writes down all that stays may name those that it was not asked about.
    stays = {_identity(rest[at]) for at in set(range(len(rest))).difference(choices)}
    for entry in kept:
        if not isinstance(entry, Mapping) or entry.get("role") not in _ROLES:
            raise ValueError("`prunedConversation` holds something that is no message")
        message = parse_message(entry)
        place = next((at for at in left if _identity(rest[at]) == _identity(message)), None)
        if place is not None:
            found.add(place)
            left = left[left.index(place) + 1 :]
        elif message.is_system or _identity(message) in stays:
            continue
        elif message.calls or message.call_id or any(_identity(rest[at]) == _identity(message) for at in choices):
            raise ValueError("`prunedConversation` holds a message that the conversation does not have there")
        else:
            notes.append(message.text.strip())
    known = set(choices).difference(left) if is_cut else set(choices)
    return Wishes(dropped=frozenset(known - found), summary="\n".join(filter(None, notes)))


def _identity(message: Message) -> tuple[str, str, str, tuple[tuple[str, str, str], ...]]:
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
    unanswered: Sequence[Sequence[str]] = (),
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
        unanswered: n, the names of a message's calls that have no result; () if every call has one.
        limit_tokens: bound on the whole.
        count: tokens of a text, for the pruning model.
    """
    head = [filled(prompt, values), ""]
    head += focus_lines(focus)
    head += [_REQUEST, defused(request), ""] if request else []
    head += [_EARLIER, defused(earlier), ""] if earlier else []
    frame = "\n".join([*head, _MESSAGES, "", _REMINDER])
    room_tokens = limit_tokens - count(frame)
    texts = [defused(without_notices(message.text).strip()) for message in messages]
    text_tokens = [count(text) for text in texts]
    weights = [1 if message.role == "tool" else _WEIGHT for message in messages]
    for brief, least_tokens in ((False, _LEAST_TOKENS), (True, _LEAST_BRIEF_TOKENS)):
        level = max(common_level(text_tokens, weights, max(room_tokens, 0)), least_tokens)
        while level >= least_tokens:
            limits = [level * weight for weight in weights]
            shown = (
                _opening(text, size, limit) if brief else excerpt(text, limit, count)
                for text, size, limit in zip(texts, text_tokens, limits, strict=True)
            )
            lines = "\n".join(
                _line(number, *each, brief=brief)
                for number, each in enumerate(
                    zip(messages, sizes, shown, unanswered or [()] * len(messages), strict=True), start=1
                )
            )
            # Quoting and the other fields come on top of the texts.
            if count(lines) <= room_tokens:
                return "\n".join([*head, _MESSAGES, lines, "", _REMINDER])
            level -= max(level // 5, 1)
    return ""


def _opening(text: str, tokens: int, limit_tokens: int) -> str:
    return text if tokens <= limit_tokens else f"{text[: len(text) * limit_tokens // tokens]}…"


def _line(number: int, message: Message, size: int, text: str, waiting: Sequence[str], *, brief: bool) -> str:
    """One message as JSON; a brief one leaves the ids out, which only a conversation written anew would need."""
    shown: dict[str, object] = {"n": number, "role": message.role, "tokens": size, "content": text}
    if message.calls:
        most = _BRIEF_ARGUMENTS_CHARS if brief else _ARGUMENTS_CHARS
        shown["calls"] = [f"{call.name}({defused(render_arguments(call.arguments))[:most]})" for call in message.calls]
    if waiting:
        # As every other prompt shows it; a line of its own would be one that can be chosen.
        shown["results"] = {defused(name): NO_RESPONSE for name in waiting}
    if message.calls and not brief:
        shown["ids"] = [defused(call.id) for call in message.calls]
    if message.call_id and not brief:
        shown["result_of"] = defused(message.call_id)
    if message.other_parts:
        shown["attached"] = list(message.other_parts)
    return json.dumps(shown, ensure_ascii=False)
