"""What is compared: our engine, and what people do without it."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.lib.measuring import (
    JsonDict,
    Method,
    SummaryCall,
    Transcript,
    Turn,
    budget,
    count,
    prompt_tokens,
    rendered,
    size,
)
from benchmarks.lib.summarisers import Kind, summary
from litellm_compaction.core.cut_points import latest_cut, protected_indices
from litellm_compaction.core.messages import Message, Request, newest_user_index, parse_message, system_prefix_length
from litellm_compaction.engine import PreparedRequest, RequestContext
from litellm_compaction.errors import DoesNotFit, SummaryFailed
from litellm_compaction.summarizer import SummaryAnswer
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokens.estimate import Estimate, Span
from tests.engine.bench import Bench, Clock, FakeAsk, FakeCounter

_SUMMARY_TOKENS = 800
# A turn takes so long that what an hour allows is no bound.
_TURN_S = 600.0
# Instruction, answer and template of a summary call.
_RESERVED_TOKENS = 1_400
_INSTRUCTION = "Summarise the conversation so far for your own later use. " * 35


class _Counter(FakeCounter):
    """Counts as the played server does."""

    async def count(
        self, target_key: str, family: Family, request: Request, *, asker: str = "", window_tokens: int = 0
    ) -> Estimate:
        sizes = tuple(size(message.raw) for message in request.messages)
        tools_tokens = count(json.dumps(request.tools, ensure_ascii=False)) if request.tools else 0
        tokens = tools_tokens + sum(sizes)
        return Estimate.exactly(tokens, sizes, tools_tokens=tools_tokens)

    def text_counter(
        self, target_key: str, family: Family, *, asker: str = "", text: Span | None = None
    ) -> Callable[[str], int]:
        return count


class _Pruner(FakeAsk):
    """A scripted pruning model that keeps what it was asked."""

    def __init__(self, kind: Kind, facts: Sequence[str]) -> None:
        super().__init__()
        self._kind = kind
        self._facts = facts
        self.calls: list[SummaryCall] = []

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        tools: Sequence[Any] = (),
        tool_choice: Any = None,
        **_: Any,
    ) -> SummaryAnswer:
        raw = [dict(message.raw) for message in messages]
        if max_tokens == 1:
            self.calls.append(SummaryCall(raw, bool(tools), ""))
            return SummaryAnswer(text=".")
        answer = summary(self._kind, "\n".join(map(rendered, raw)), self._facts, max_tokens)
        self.calls.append(SummaryCall(raw, bool(tools), answer))
        if not answer:
            raise SummaryFailed("error")
        return SummaryAnswer(text=answer)


def ours(kind: Kind, transcript: Transcript, window_tokens: int, *, background: str = "off", **settings: Any) -> Method:
    """This package's engine with a scripted pruning model; with `background: idle` its client is never in a hurry."""
    pruner = _Pruner(kind, [fact["text"] for fact in transcript.facts])
    clock = Clock()
    bench = Bench(counter=_Counter(), ask=pruner, clock=clock)
    # A client sends the same messages again in each request.
    parsed = {id(message): parse_message(message) for message in transcript.messages}

    async def send(transcript: Transcript, client: Sequence[JsonDict]) -> Turn:
        pruner.calls.clear()
        request = Request(messages=tuple(parsed[id(message)] for message in client), tools=tuple(transcript.tools))
        context = bench.context(window_tokens, may_write_ahead=_yes, background=background, **settings)
        try:
            guarded = await bench.compactor.guard(request, context)
        except DoesNotFit:
            return Turn(None)
        sent = client if guarded.messages is None else [message.raw for message in guarded.messages]
        calls = tuple(pruner.calls)
        pruner.calls.clear()
        if background == "idle":
            clock.now_s += _TURN_S
            await _rest(bench, request, context, guarded, transcript.messages[len(client)])
        is_new = guarded.action == "compacted"
        return Turn(sent, calls, guarded.action != "none", is_new, later=tuple(pruner.calls))

    return send


async def _yes() -> bool:
    return True


async def _rest(
    bench: Bench, request: Request, context: RequestContext, guarded: PreparedRequest, answer: JsonDict
) -> None:
    """Lets what is written ahead behind an answer come to its end."""
    used_tokens = guarded.count.tokens + size(answer)
    text = "" if answer.get("tool_calls") else str(answer.get("content") or "")
    bench.compactor.background.answered(request, context, guarded, answer=text, used_tokens=used_tokens)
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.gather(*others, return_exceptions=True)


def _without_null(message: JsonDict) -> JsonDict:
    return {**message, "content": message.get("content") or ""}


def greedy(transcript: Transcript, window_tokens: int) -> Method:
    """The optimum of a greedy rule: at each compaction everything but the protected tail goes, for 800 tokens."""
    covered = 0
    rounds = itertools.count(1)
    record = ""
    limits = budget(window_tokens)

    def applied(client: Sequence[JsonDict]) -> list[JsonDict]:
        if not covered:
            return list(client)
        messages = tuple(map(parse_message, client))
        lead = system_prefix_length(messages)
        tail = list(client[covered:])
        if tail and tail[0]["role"] == "user":
            carrier = {**tail[0], "content": record + tail[0]["content"]}
            return [*client[:lead], carrier, *map(_without_null, tail[1:])]
        newest = newest_user_index(messages)
        pinned = client[newest]["content"] if newest is not None and newest < covered else ""
        return [*client[:lead], {"role": "user", "content": record + pinned}, *map(_without_null, tail)]

    async def send(transcript: Transcript, client: Sequence[JsonDict]) -> Turn:
        nonlocal covered, record
        now = applied(client)
        if not limits.triggers(prompt_tokens(transcript.tools, now)):
            return Turn(now, is_compacted=covered > 0)
        messages = tuple(map(parse_message, client))
        if latest_cut(messages) <= max(covered, system_prefix_length(messages)):
            return Turn(now, is_compacted=covered > 0)
        text = f"Round {next(rounds)}.\n" + "word " * (_SUMMARY_TOKENS - 8) + "\n\n"
        call = SummaryCall([*now, {"role": "user", "content": _INSTRUCTION}], True, text)
        covered, record = latest_cut(messages), text
        return Turn(applied(client), (call,), is_compacted=True, is_new=True)

    return send


def every_time(kind: Kind, transcript: Transcript, window_tokens: int) -> Method:
    """A stateless summariser: above the trigger, every request pays for a summary of everything that came before."""
    facts = [fact["text"] for fact in transcript.facts]
    limits = budget(window_tokens)

    async def send(transcript: Transcript, client: Sequence[JsonDict]) -> Turn:
        if not limits.triggers(prompt_tokens(transcript.tools, client)):
            return Turn(client)
        messages = tuple(map(parse_message, client))
        protected = sorted(protected_indices(messages))
        lead = system_prefix_length(messages)
        tail = [dict(client[index]) for index in protected if index >= lead]
        room = window_tokens - _RESERVED_TOKENS
        # As much of the newest as the pruning model's own window takes.
        shown: list[JsonDict] = []
        for message in reversed(client[lead : latest_cut(messages)]):
            room -= size(message)
            if room < 0:
                break
            shown.insert(0, message)
        prompt = "\n".join(map(rendered, shown)) + _INSTRUCTION
        answer = summary(kind, prompt, facts, _SUMMARY_TOKENS)
        if tail and tail[0]["role"] == "user":
            tail[0]["content"] = answer + "\n\n" + tail[0]["content"]
        else:
            tail.insert(0, {"role": "user", "content": answer})
        call = SummaryCall([{"role": "user", "content": prompt}], False, answer)
        return Turn([*client[:lead], *map(_without_null, tail)], (call,), is_compacted=True, is_new=True)

    return send


# Directives whole; of anything else a few words around dates, sums, percentages and names.
_DIRECTIVE = re.compile(r"(?i:\b(?:always|never|prefer|please|must|avoid|decided|chose)\b)[^.!?\n]*")
_AROUND = re.compile(r"(?:\S+ ){0,6}(?:\S*\d\S*|(?<=[a-z,] )[A-Z][a-z]\S*)(?: \S+){0,3}")
_CODE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)


def by_rule(messages: Sequence[JsonDict], sent: Sequence[JsonDict]) -> list[JsonDict]:
    """A prompt of ours with a simple rule's record in place of ours, within the same tokens.

    The rule: each of the user's messages has the same share; directives first, then what stands around values.
    """
    own = {rendered(message): message for message in messages}
    kept: list[JsonDict] = []
    for message in sent:
        # Our record stands before the text of one of the user's messages.
        after = (each for each in reversed(messages) if each["role"] == "user")
        of_user = next((each for each in after if str(message["content"]).endswith(each["content"])), None)
        known = own.get(rendered(message)) or of_user
        kept += [known] if known else []
    room_tokens = prompt_tokens((), sent) - prompt_tokens((), [*kept, {"role": "user"}])
    lines: list[str] = []
    users = [_CODE.sub("", message["content"]) for message in messages if message["role"] == "user"]
    for index, text in enumerate(users):
        share_tokens = room_tokens / (len(users) - index)
        taken: list[str] = []
        for piece in [*_DIRECTIVE.findall(text), *_AROUND.findall(text)]:
            if piece not in " ".join(taken) and count(" ".join([*taken, piece]) + "\n") < share_tokens:
                taken.append(piece)
        lines += [" ".join(taken)] if taken else []
        room_tokens -= count(" ".join(taken) + "\n")
    return [{"role": "user", "content": "\n".join(lines)}, *kept]


def stock(transcript: Transcript, window_tokens: int) -> Method:
    """What the server does on its own: the middle goes, token by token, without a word to anybody."""

    async def send(transcript: Transcript, client: Sequence[JsonDict]) -> Turn:
        over = prompt_tokens(transcript.tools, client) + 256 - window_tokens
        if over <= 0:
            return Turn(client)
        cut: list[JsonDict] = []
        for index, message in enumerate(client):
            if index < 2 or over <= 0:
                cut.append(message)
            elif size(message) <= over:
                over -= size(message)
            else:
                text = message.get("content") or ""
                cut.append({**message, "content": text[len(text) * over // size(message) :]})
                over = 0
        return Turn(cut, is_compacted=True, is_new=True, is_cut=True)

    return send


def trimmed(transcript: Transcript, window_tokens: int) -> Method:
    """LiteLLM's `trim_messages`, as its documentation calls it."""
    import litellm

    async def send(transcript: Transcript, client: Sequence[JsonDict]) -> Turn:
        room = window_tokens - count(json.dumps(transcript.tools)) - 256
        sent = litellm.utils.trim_messages([dict(each) for each in client], model="gpt-4o", max_tokens=room)
        return Turn(sent, is_compacted=sent != list(client), is_new=sent != list(client))

    return send


def compressed(transcript: Transcript, window_tokens: int) -> Method:
    """LiteLLM's `compress`: messages of little relevance to the newest one become stubs."""
    import litellm

    async def send(transcript: Transcript, client: Sequence[JsonDict]) -> Turn:
        result = litellm.compress(
            [{**each, "content": each.get("content") or ""} for each in client],
            "gpt-4o",
            compression_trigger=int(0.8 * window_tokens),
        )
        sent = result["messages"]
        return Turn(sent, is_compacted=sent != list(client), is_new=sent != list(client))

    return send
