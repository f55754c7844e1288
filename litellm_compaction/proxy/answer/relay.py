"""One upstream stream on its way to the client: text to send now, text to hold, and the time to stop.

It knows nothing of plans: `loop.py` decides what follows its end.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from litellm_compaction.core.cuts import settled_length, unstopped_length
from litellm_compaction.core.joiner import Joiner
from litellm_compaction.core.messages import ToolCall, is_only_thoughts
from litellm_compaction.engine import RECALL, Outcome
from litellm_compaction.errors import Overflow, is_crash
from litellm_compaction.proxy.answer import sse
from litellm_compaction.proxy.answer.calls import Calls, Kept
from litellm_compaction.proxy.answer.client import OneAnswer
from litellm_compaction.proxy.answer.legs import FULL_RATIO, NEAR_FULL_RATIO, UNNAMED, End, Leg, judged
from litellm_compaction.proxy.answer.sse import Chunk, UpstreamDropped, UpstreamError
from litellm_compaction.proxy.wire import Usage, usage_of
from litellm_compaction.tokens.counter import GeneratedTokens

_CALL_ROOM_TOKENS, _KEPT_REASONING_CHARS = 4096, 40_000
_KNOWN_FIELDS = frozenset({"role", "content", "tool_calls", *sse.REASONING_FIELDS})
_WORTH_A_RESTART_TOKENS = 32
# No model writes so many windows full, however wrong our count is.
_ENDLESS_RATIO = 4
# Of an answer that begins: nothing is taken out.
_UNJOINED = Joiner("")


class Ending(NamedTuple):
    """A stream's end: an `overflow` as the server has told it, and `refusal` its form, in one word for logs."""

    end: End | None = None
    error: UpstreamError | None = None
    overflow: Overflow | None = None
    refusal: str = ""


class Words:
    """The text of one leg, joined to what the client has, and held where a stop could not take it back."""

    def __init__(self, leg: Leg, one: OneAnswer) -> None:
        partial = one.sent_text
        self._one = one
        self.held, self.are_joined = "", bool(partial)
        self.joiner = self.judge = _UNJOINED
        if partial:
            joiner = functools.partial(Joiner, partial, shown=leg.prepared.shown, is_settled=one.is_settled)
            self.joiner = self.judge = joiner()
            if leg.prepared.continuation.is_trusted:
                # A trusted way is judged all the same: a server may be updated.
                self.joiner = joiner(is_trusted=True)

    def joined(self, text: str) -> str:
        if not self.are_joined:
            return text
        if self.judge is not self.joiner:
            self.judge.feed(text)
        return self.joiner.feed(text)

    def sendable(self, text: str, *, whole_words: bool) -> str:
        """Returns the part that may go out now that `text` has come."""
        if whole_words and text.isspace():
            # It goes out with the next word, and is not looked at again with each blank.
            self.held += text
            return ""
        text = self.held + text
        settled = unstopped_length(text, self._one.asked.stops) if self._one.asked.stops else len(text)
        if whole_words:
            settled = settled_length(text[:settled])
        if settled:
            # It may end inside a word where no other answer shares the window.
            self._one.is_settled = whole_words
        self.held = text[settled:]
        return text[:settled]

    def rest(self) -> str:
        text, self.held = self.held, ""
        return text


class Relay:
    """The reader of one leg's stream, who knows what it is held against, what has come, and how it ended.

    An answer cannot be cut inside its `calls`, nor go on once the client has a part of one. Where it `has_company` it
    may end at any moment: nothing is sent that ends inside a word.
    """

    def __init__(self, leg: Leg, one: OneAnswer) -> None:
        prepared = leg.prepared
        self.leg, self.one = leg, one
        self._stop_tokens: float = int(prepared.budget.rules.streaming_ratio * prepared.window.tokens)
        self._thoughts_tokens = leg.thoughts_tokens
        self.generated = GeneratedTokens(prepared.count_text)
        self.words = Words(leg, one)
        self.calls = Calls()
        self.calls.ours = RECALL if prepared.tools is not None else None
        self.has_begun = self.has_company = False
        self.usage_fields: Mapping[str, Any] = {}  # As the server wrote them, and what they say.
        self._usage: Usage | None = None
        self.finish_reason: str | None = None
        self.ending = Ending()

    def take(self, chunk: Chunk) -> list[Chunk]:
        """The deltas to send for `chunk`; sets `ending` when the stream has to be stopped."""
        if error := chunk.get("error"):
            code = error.get("code") if isinstance(error, Mapping) else None
            # The server has accepted the request: without a number of its own it failed over its work.
            status = code if isinstance(code, int) else HTTPStatus.INTERNAL_SERVER_ERROR
            text = json.dumps(error, default=str)[: sse.ERROR_BYTES]
            self.fail(UpstreamError(text, chunk, status=status, is_inside=True))
            return []
        if chunk.get("usage") and (usage := usage_of(chunk)) is not None:
            self.usage_fields, self._usage = dict(chunk["usage"]), usage
        # Nobody has asked for another choice than the first.
        choice: Chunk = next((each for each in chunk.get("choices") or () if not each.get("index")), {})
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if not isinstance(delta := choice.get("delta"), dict):
            return []
        deltas = [*self._reasoning(delta), *self._text(delta), *self._tool_calls(delta)]
        # Fields of some servers only, and parts of an answer that are no text, go on as they came.
        others = {
            key: value
            for key, value in delta.items()
            if value and (key not in _KNOWN_FIELDS or (key == "content" and not isinstance(value, str)))
        }
        if others:
            deltas = [{**deltas[0], **others}, *deltas[1:]] if deltas else [others]
        self._stop_if_full()
        return deltas

    def _reasoning(self, delta: Mapping[str, Any]) -> list[Chunk]:
        thoughts = {name: text for name in sse.REASONING_FIELDS if isinstance(text := delta.get(name), str) and text}
        if not thoughts:
            return []
        # A server that fills both says the same in each.
        text = next(iter(thoughts.values()))
        self._count(text)
        self.one.reasoning = (self.one.reasoning + text)[-_KEPT_REASONING_CHARS:]
        has_text = bool(self.one.text or self.one.earlier_text)
        return [thoughts] if self.one.asked.takes_late_thoughts or not has_text else []

    def _text(self, delta: Mapping[str, Any]) -> list[Chunk]:
        text = delta.get("content")
        if not isinstance(text, str) or not text:
            return []
        self._count(text)
        joiner = self.words.joiner
        had_echo, text = bool(joiner.echoed_text), self.words.joined(text)
        if joiner.echoed_text and not had_echo:
            # The server repeats the text that it was shown; nothing of that has been generated.
            self.generated = GeneratedTokens(self.generated.of)
            self.generated.add(text)
        return self._sent(self.words.sendable(text, whole_words=self.has_company or self.is_near_the_end))

    def _tool_calls(self, delta: Mapping[str, Any]) -> list[Chunk]:
        fragments = delta.get("tool_calls") or ()
        if not fragments:
            return []
        for fragment in fragments:
            function = fragment.get("function") or {}
            self._count(f"{function.get('name') or ''}{function.get('arguments') or ''}")
        text = self._sent(self.words.rest())
        sent = self.calls.take(fragments, may_begin=not (self.one.asked.is_whole or self.would_hold_calls))
        return [*text, *([{"tool_calls": sent}] if sent else ())]

    def _count(self, text: str) -> None:
        self.has_begun = True
        self.generated.add(text)

    def _sent(self, text: str) -> list[Chunk]:
        if not text:
            return []
        self.one.text.append(text)
        return [{"content": text}]

    def _stop_if_full(self) -> None:
        tokens, prepared = self.generated.tokens, self.leg.prepared
        if tokens > _ENDLESS_RATIO * prepared.window.tokens:
            self.ending = Ending("failed", sse.faulty("its answer does not end"))
        if self.calls or self.end is not None or self.finish_reason is not None or self.words.joiner.may_be_echo:
            return
        if prepared.count.tokens + tokens >= self._stop_tokens:
            self.ending = Ending("limit")
        elif tokens >= self._thoughts_tokens:
            self._thoughts_tokens = math.inf
            text = self.one.sent_text + self.words.held
            if (text or self.one.reasoning) and is_only_thoughts(text):
                self.ending = Ending("overthought")

    def stop(self) -> None:
        """Ends the stream because others need its room; a call that the client has begun to get may finish."""
        if self.end is None and not self.calls.has_begun and self.finish_reason is None:
            self.ending = Ending("called_back")

    def go_on_to_the_end(self) -> None:
        """Stops no more: nothing would be gained by it, and the server's own limit is the end."""
        self.ending, self._stop_tokens = Ending(), math.inf

    @property
    def would_hold_calls(self) -> bool:
        """A call that began now would be held until it is whole: the window may end within it."""
        left_tokens = math.inf if self.leg.is_clients_limit else self.leg.max_tokens - self.generated.tokens
        return self.is_near_the_end or left_tokens < _CALL_ROOM_TOKENS

    @property
    def is_near_the_end(self) -> bool:
        return self.finish_reason == "length" or self.generated.tokens >= self.leg.danger_tokens

    @property
    def end(self) -> End | None:
        return self.ending.end

    def closed(self, error: UpstreamError | None = None) -> list[Chunk]:
        """Judges a stream that has ended, or failed; what is held of a whole answer goes out."""
        if error is not None and not isinstance(error, UpstreamDropped):
            self.fail(error)
            return []
        # Of a broken connection only the end may be missing.
        has_ended = error is None or self.finish_reason is not None
        breaks_off = self._breaks_off()
        # Within a call, and nobody says why.
        is_broken = self.finish_reason is None and not self.calls.are_whole
        flushed = self.surrendered("all") if has_ended and not (breaks_off or is_broken) else []
        full_tokens = (FULL_RATIO if self.usage_fields else NEAR_FULL_RATIO) * self.leg.prepared.window.tokens
        if not self.has_begun and self.tokens.prompt_tokens >= full_tokens:
            self.ending = Ending("overflow", refusal="empty_stream")
        elif breaks_off:
            # By now the server has told how much room there is for more.
            has_room = self.leg.is_doubted and sum(self.tokens) < self._stop_tokens
            self.ending = Ending("spent" if self.leg.is_share or has_room else "limit")
        elif not has_ended:
            self.ending = Ending("failed", error)
        elif not self.has_begun and self.finish_reason is None:
            # Nothing was said, not even that this is all.
            self.ending = Ending("failed", sse.faulty("its answer is empty"))
        else:
            self.ending = Ending("failed", sse.faulty()) if is_broken else Ending("done")
        return flushed

    def fail(self, error: UpstreamError) -> None:
        """Judges a stream that ended with the server's error, or did not begin: its window may be full."""
        prepared, asked, has_crashed = self.leg.prepared, self.one.asked, is_crash(error.text)
        overflow = judged(
            error.text,
            asked.client_text,
            used_tokens=prepared.count.high + self.tokens.completion_tokens,
            window_tokens=prepared.window.tokens,
        )
        if overflow is None and has_crashed and self.looks_full():
            overflow = UNNAMED
        if overflow is None:
            self.ending = Ending("failed", error)
        else:
            named = "error_event" if error.is_inside else f"http_{error.status}" if error.status else "error"
            self.ending = Ending("overflow", error, overflow, "crash" if has_crashed else named)

    def surrendered(self, which: Kept = "no") -> list[Chunk]:
        """Everything that is held; of the client's calls those that are to be kept."""
        words, text = self.words, self.words.rest()
        if words.are_joined:
            text += words.joiner.finish(is_complete=self.finish_reason == "stop")
        sent = [*self._sent(text), *(self.one.close_thoughts() if words.are_joined else ())]
        # One by one as servers send them; LlamaIndex reads the first call of an event only.
        return [*sent, *({"tool_calls": [call]} for call in (self.calls.given_up(which) if self.calls else ()))]

    def _breaks_off(self) -> bool:
        """The answer ended because the window did, and not the model, the client or the server wanted it to."""
        if self.finish_reason != "length":
            return self.finish_reason is None and self.looks_full()
        tokens, most_tokens, asked_tokens = self.tokens.completion_tokens, self.leg.max_tokens, self.leg.asked_tokens
        # LM Studio 0.4.22 reports one token less than the limit (lmstudio-bug-tracker 2335).
        is_reported = bool(self.usage_fields) and tokens + 1 >= most_tokens
        fills_its_limit = is_reported or self.generated.exact() >= NEAR_FULL_RATIO * most_tokens
        if not (fills_its_limit or self.has_company or self.looks_full()):
            # A limit of the server's own, far below ours, ends the next request as well.
            return False
        removed = self._removed_tokens()
        # A few words that were taken out are not worth another request.
        given = tokens - (removed if removed >= _WORTH_A_RESTART_TOKENS else 0)
        return asked_tokens is None or most_tokens < asked_tokens or given + 1 < asked_tokens

    @property
    def tokens(self) -> Usage:
        """Of the prompt and of the answer, both in the window: as the server says, else as we count."""
        return self._usage or Usage(self.leg.prepared.count.tokens, self.generated.exact())

    @property
    def used_tokens(self) -> int:
        return min(sum(self.tokens), self.leg.prepared.window.tokens)

    def looks_full(self) -> bool:
        return sum(self.tokens) >= NEAR_FULL_RATIO * self.leg.prepared.window.tokens

    @property
    def is_full(self) -> bool:
        return self.end == "overflow" or self.looks_full()

    @property
    def is_stopped(self) -> bool:
        """By us: the stream could still go on."""
        return self.end in ("limit", "called_back", "overthought")

    @property
    def lost_tokens(self) -> int:
        """Generated tokens that the client never gets: cut calls, ours, and text that the joiner took out."""
        if not (self.calls or self.words.are_joined):
            return 0
        ours = sum(self.generated.of(call.text) for call in self.calls.of("ours"))
        return min(self.cut_call_tokens + self._removed_tokens() + ours, self.tokens.completion_tokens)

    @property
    def cut_call_tokens(self) -> int:
        """Tokens of the calls that were cut before the client had any of them: they would have to be written again."""
        return sum(self.generated.of(call.text) for call in self.calls.held) if self.end != "done" else 0

    def _removed_tokens(self) -> int:
        removed = self.generated.of(self.words.joiner.removed_text)
        return min(self._repeated_tokens() + removed, self.tokens.completion_tokens)

    def _repeated_tokens(self) -> int:
        """Those of an echo, if the model has generated it again, by the server's own number."""
        echo_tokens = self.generated.of(self.words.joiner.echoed_text)
        return echo_tokens if self.tokens.completion_tokens > self.generated.exact() + echo_tokens / 2 else 0

    def outcome(self) -> Outcome | None:
        """The lesson about the stream's way; None for none, as behind thoughts, where the answer itself begins."""
        if (opening := self.words.judge.opening) == "undecided" or self.leg.prepared.continuation.closing is not None:
            return None
        return "began_anew" if opening == "anew" or self._repeated_tokens() else "went_on"

    @property
    def recalls(self) -> list[ToolCall]:
        """The calls of our own tool, if they are whole."""
        if not self.calls or self.end != "done" or self.finish_reason == "length":
            return []
        calls = self.calls.of("ours")
        return [ToolCall(id=call.id or "", name=RECALL, arguments="".join(call.arguments)) for call in calls]
