"""One upstream stream on its way to the client: text to send now, text to hold, and the time to stop.

It knows nothing of plans: `loop.py` decides what follows its end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from litellm_compaction.core.cuts import THINK_END, is_only_thoughts, open_think, settled_length, unstopped_length
from litellm_compaction.core.joiner import Joiner
from litellm_compaction.core.messages import ToolCall
from litellm_compaction.engine import RECALL, Outcome
from litellm_compaction.errors import Overflow, is_crash
from litellm_compaction.proxy.answer.calls import Calls, Kept
from litellm_compaction.proxy.answer.client import Asked, Progress
from litellm_compaction.proxy.answer.endings import (
    FULL_RATIO,
    GIVES_WAY,
    NEAR_FULL_RATIO,
    STOPPED,
    UNNAMED,
    End,
    judged,
)
from litellm_compaction.proxy.answer.sse import ERROR_BYTES, REASONING_FIELDS, Chunk, UpstreamError, broken, unreadable
from litellm_compaction.proxy.answer.upstream import Leg
from litellm_compaction.proxy.wire import Usage, usage_of
from litellm_compaction.tokens.counter import GeneratedTokens

# From here on nothing is sent that could not be taken back: text ends at a word, tool calls are complete.
_DANGER_RATIO = 0.80
_DANGER_OUTPUT_RATIO = 0.60
_CALL_ROOM_TOKENS = 4096
_KNOWN_FIELDS = frozenset({"role", "content", "tool_calls", *REASONING_FIELDS})
_KEPT_REASONING_CHARS = 40_000
_NO_CHOICE = object()
_WORTH_A_RESTART_TOKENS = 32
# No model writes so many windows full, however wrong our count is.
_ENDLESS_RATIO = 4


class Relay:
    """The reader of one leg's stream, who knows what it is held against, what has come, and how it ended.

    Most of its attributes are what has come: a stream tells that in any order, and its end is judged by all of it.

    Attributes:
        calls: those that have begun: an answer cannot be cut inside them, nor go on once the client has a part of one.
        has_company: others in its context can end it at any moment: nothing is sent that ends inside a word.
        is_inside_a_word: the sent text may end inside a word, since no other answer shared the window then.
        usage_fields: the usage with all its fields, as the server wrote them.
        overflow: as the server has told it, and `refusal` its form, in one word for logs.
    """

    def __init__(self, leg: Leg, progress: Progress, asked: Asked, *, streaming_ratio: float) -> None:
        self._progress = progress
        self._asked = asked
        self.leg = leg
        self.prepared = prepared = leg.prepared
        self._window_tokens = prepared.window.tokens
        self._stop_tokens: float = int(streaming_ratio * self._window_tokens)
        self._most_thoughts_tokens = leg.thoughts_tokens
        window_left = _DANGER_RATIO * self._window_tokens - prepared.count.tokens
        self._danger_tokens = min(window_left, _DANGER_OUTPUT_RATIO * leg.max_tokens)
        self.generated = GeneratedTokens(prepared.count_text)
        partial, shown = progress.sent_text, prepared.shown
        self._joiner = Joiner(partial, shown=shown, is_trusted=prepared.continuation.is_trusted) if partial else None
        # A trusted way is judged all the same: a server may be updated.
        self._judge = Joiner(partial, shown=shown) if partial and prepared.continuation.is_trusted else self._joiner
        self._echo_tokens = 0
        self._tail = ""
        self.calls = Calls(RECALL if prepared.tools is not None else None)
        # Of the choice that is the answer; nobody has asked for others.
        self._index: object = _NO_CHOICE
        self.has_begun = self.has_company = self.is_inside_a_word = False
        self.usage: Usage | None = None
        self.usage_fields: Mapping[str, Any] = {}
        self.finish_reason: str | None = None
        self.end: End | None = None
        self.overflow: Overflow | None = None
        self.refusal = ""
        self.error: UpstreamError | None = None

    def take(self, chunk: Chunk) -> list[Chunk]:
        """The deltas to send for `chunk`; sets `end` when the stream has to be stopped."""
        if error := chunk.get("error"):
            self._fail_inside(error, chunk)
            return []
        if chunk.get("usage") and (usage := usage_of(chunk)) is not None:
            self.usage, self.usage_fields = usage, dict(chunk["usage"])
        choices = chunk.get("choices") or ()
        if self._index is _NO_CHOICE and choices:
            self._index = choices[0].get("index")
        choice: Chunk = next((each for each in choices if each.get("index") == self._index), {})
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        delta = choice.get("delta")
        if not isinstance(delta, dict):
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

    def _stop_if_full(self) -> None:
        if self.generated.tokens > _ENDLESS_RATIO * self._window_tokens:
            self.end, self.error = "failed", unreadable("its answer does not end")
        if self.calls or self.end is not None or self.finish_reason is not None:
            return
        if self.used_tokens >= self._stop_tokens:
            self.end = "limit"
        elif self.generated.tokens >= self._most_thoughts_tokens:
            self._most_thoughts_tokens = math.inf
            text = self._progress.sent_text + self._tail
            if (text or self._progress.reasoning) and is_only_thoughts(text):
                self.end = "overthought"

    def _reasoning(self, delta: Mapping[str, Any]) -> list[Chunk]:
        thoughts = {name: text for name in REASONING_FIELDS if isinstance(text := delta.get(name), str) and text}
        if not thoughts:
            return []
        # A server that fills both says the same in each.
        text = next(iter(thoughts.values()))
        self._count(text)
        self._progress.reasoning = (self._progress.reasoning + text)[-_KEPT_REASONING_CHARS:]
        return [thoughts]

    def _text(self, delta: Mapping[str, Any]) -> list[Chunk]:
        text = delta.get("content")
        if not isinstance(text, str) or not text:
            return []
        self._count(text)
        if self._joiner is not None:
            text = self._joined(self._joiner, text)
        holds_words = self.has_company or self.is_near_the_end
        if holds_words and text.isspace():
            # It goes out with the next word, and is not looked at again with each blank.
            self._tail += text
            return []
        text = self._tail + text
        settled = unstopped_length(text, self._asked.stops)
        if holds_words:
            settled = settled_length(text[:settled])
        self._tail = text[settled:]
        if settled:
            self.is_inside_a_word = not holds_words
        return self._sent(text[:settled])

    def _joined(self, joiner: Joiner, text: str) -> str:
        had_echo = bool(joiner.echoed_text)
        if self._judge is not None and self._judge is not joiner:
            self._judge.feed(text)
        text = joiner.feed(text)
        if joiner.echoed_text and not had_echo:
            # The server repeats the text that it was shown; nothing of that has been generated.
            self._echo_tokens = self.generated.of(joiner.echoed_text)
            self.generated = GeneratedTokens(self.generated.of)
            self.generated.add(text)
        return text

    def _tool_calls(self, delta: Mapping[str, Any]) -> list[Chunk]:
        fragments = delta.get("tool_calls") or ()
        if not fragments:
            return []
        for fragment in fragments:
            function = fragment.get("function") or {}
            self._count(f"{function.get('name') or ''}{function.get('arguments') or ''}")
        tail, self._tail = self._tail, ""
        has_room = self.leg.max_tokens - self.generated.tokens >= _CALL_ROOM_TOKENS
        may_begin = has_room and not (self._asked.is_whole or self.is_near_the_end)
        sent = self.calls.take(fragments, may_begin=may_begin)
        return [*self._sent(tail), *([{"tool_calls": sent}] if sent else ())]

    def _sent(self, text: str) -> list[Chunk]:
        if not text:
            return []
        self._progress.text.append(text)
        return [{"content": text}]

    def _count(self, text: str) -> None:
        self.has_begun = True
        self.generated.add(text)

    def surrendered(self, kept: Kept = "no") -> list[Chunk]:
        """Everything that is held; of the client's calls those that are `kept`."""
        text, self._tail = self._tail, ""
        if self._joiner is not None:
            text += self._joiner.finish(is_complete=self.finish_reason == "stop")
        # One by one as servers send them; LlamaIndex reads the first call of an event only.
        return [*self._sent(text), *({"tool_calls": [call]} for call in self.calls.given_up(kept))]

    def closed_thoughts(self) -> list[Chunk]:
        """The end of the thoughts inside which the text stops, so that the rest is none; [] elsewhere."""
        return self._sent(f"\n{THINK_END}\n\n") if open_think(self._progress.sent_text) else []

    def closed(self, error: UpstreamError | None = None) -> list[Chunk]:
        """Judges a stream that has ended, or whose connection broke; what is held of a whole answer goes out."""
        # Of a broken connection only the end may be missing.
        has_ended = error is None or self.finish_reason is not None
        breaks_off = self._breaks_off()
        flushed = self.surrendered("all") if has_ended and not (breaks_off or self._is_broken) else []
        if not self.has_begun and self.looks_full(FULL_RATIO if self.usage else NEAR_FULL_RATIO):
            self.end, self.refusal = "overflow", "empty_stream"
        elif breaks_off:
            # By now the server has told how much room there is for more.
            has_room = self.leg.is_doubted and self.filled_tokens < self._stop_tokens
            self.end = "spent" if self.leg.is_share or has_room else "limit"
        elif not has_ended:
            self.end, self.error = "failed", error
        elif not self.has_begun and self.finish_reason is None:
            # Nothing was said, not even that this is all.
            self.end, self.error = "failed", unreadable("its answer is empty")
        elif self._is_broken:
            self.end, self.error = "failed", broken()
        else:
            self.end = "done"
        return flushed

    def fail(self, error: UpstreamError) -> None:
        """Judges a stream that ended with the server's error, or did not begin: its window may be full."""
        self.end, self.error = "failed", error
        used_tokens = self.prepared.count.high + self.completion_tokens()
        overflow = judged(
            error.text, self._asked.client_text, used_tokens=used_tokens, window_tokens=self._window_tokens
        )
        has_crashed = is_crash(error.text)
        if overflow is None and has_crashed and self.looks_full(NEAR_FULL_RATIO):
            overflow = UNNAMED
        if overflow is not None:
            self.end, self.overflow = "overflow", overflow
            named = "error_event" if error.is_inside else f"http_{error.status}" if error.status else "error"
            self.refusal = "crash" if has_crashed else named

    def _fail_inside(self, said: Any, chunk: Chunk) -> None:
        code = said.get("code") if isinstance(said, Mapping) else None
        # The server has accepted the request: without a number of its own it failed over its work.
        status = code if isinstance(code, int) else HTTPStatus.INTERNAL_SERVER_ERROR
        self.fail(UpstreamError(json.dumps(said, default=str)[:ERROR_BYTES], chunk, status=status, is_inside=True))

    def stop(self) -> None:
        """Ends the stream because others need its room; a call that the client has begun to get may finish."""
        if self.end is None and not self.calls.has_begun and self.finish_reason is None:
            self.end = "called_back"

    def go_on_to_the_end(self) -> None:
        """Stops no more: nothing would be gained by it, and the server's own limit is the end."""
        self.end, self._stop_tokens = None, math.inf

    @property
    def is_left_running(self) -> bool:
        """We ended the stream: the server learns of it a moment later."""
        return self.end in (*GIVES_WAY, *STOPPED) and self.finish_reason is None

    @property
    def _is_broken(self) -> bool:
        """The stream ended within a call, and nobody says why."""
        return self.finish_reason is None and not self.calls.are_whole

    def _breaks_off(self) -> bool:
        """The answer ended because the window did, not because the model or the client wanted it to.

        Nor the server: a limit of its own or of its operator's, far below ours, ends the next request as well.
        """
        if self.finish_reason != "length":
            return self.finish_reason is None and self.looks_full(NEAR_FULL_RATIO)
        most_tokens, asked_tokens = self.leg.max_tokens, self.leg.asked_tokens
        # LM Studio 0.4.22 reports one token less than the limit (lmstudio-bug-tracker 2335).
        is_reported = self.usage is not None and self.usage.completion_tokens + 1 >= most_tokens
        fills_its_limit = is_reported or self.generated.exact() >= NEAR_FULL_RATIO * most_tokens
        if not (fills_its_limit or self.has_company or self.looks_full(NEAR_FULL_RATIO)):
            return False
        removed = self._removed_tokens()
        # A few words that were taken out are not worth another request.
        generated = self.completion_tokens() - (removed if removed >= _WORTH_A_RESTART_TOKENS else 0)
        return asked_tokens is None or most_tokens < asked_tokens or generated + 1 < asked_tokens

    def completion_tokens(self) -> int:
        return self.usage.completion_tokens if self.usage is not None else self.generated.exact()

    @property
    def used_tokens(self) -> int:
        return self.prepared.count.tokens + self.generated.tokens

    @property
    def filled_tokens(self) -> int:
        """Of the window: as the server says, else as we count."""
        return self.used_tokens if self.usage is None else sum(self.usage)

    @property
    def is_near_the_end(self) -> bool:
        """The window may end soon; our count of generated tokens may be off by a quarter."""
        return self.finish_reason == "length" or self.generated.tokens >= self._danger_tokens

    def looks_full(self, ratio: float) -> bool:
        prompt_tokens = self.usage.prompt_tokens if self.usage is not None else self.prepared.count.tokens
        return prompt_tokens + self.completion_tokens() >= ratio * self._window_tokens

    @property
    def is_full(self) -> bool:
        return self.end == "overflow" or self.looks_full(_DANGER_RATIO)

    @property
    def lost_tokens(self) -> int:
        """Generated tokens that the client never gets: cut calls, ours, and text that the joiner took out."""
        ours = sum(self.generated.of(call.text) for call in self.calls.ours)
        return min(self.cut_call_tokens + self._removed_tokens() + ours, self.completion_tokens())

    @property
    def cut_call_tokens(self) -> int:
        """Tokens of the calls that were cut before the client had any of them: they would have to be written again."""
        return sum(self.generated.of(call.text) for call in self.calls.held) if self.end != "done" else 0

    def _removed_tokens(self) -> int:
        removed = self.generated.of(self._joiner.removed_text) if self._joiner is not None else 0
        return min(self._repeated_tokens() + removed, self.completion_tokens())

    def _repeated_tokens(self) -> int:
        """Those of the shown text, if the model has generated it again, by the server's own number."""
        if self.usage is None or self.usage.completion_tokens < self.generated.exact() + self._echo_tokens / 2:
            return 0
        return self._echo_tokens

    def outcome(self) -> Outcome | None:
        """The lesson about the stream's way; None for none."""
        opening = self._judge.opening if self._judge is not None else "undecided"
        if opening == "undecided":
            return None
        return "began_anew" if opening == "anew" or self._repeated_tokens() else "went_on"

    @property
    def recalls(self) -> list[ToolCall]:
        """The calls of our own tool, if they are whole."""
        if self.end != "done" or self.finish_reason == "length":
            return []
        calls = self.calls.ours
        return [ToolCall(id=call.id or "", name=RECALL, arguments="".join(call.arguments)) for call in calls]
