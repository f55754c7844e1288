"""One upstream stream on its way to the client: text to send now, text to hold, and the time to stop.

The client reads one answer whatever stream a delta came from: one id, one role, one finish_reason (promise P6).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from litellm_compaction.core.continuation.joiner import Joiner
from litellm_compaction.core.continuation.text import (
    THINK_END,
    is_only_thoughts,
    open_think,
    settled_length,
    unstopped_length,
)
from litellm_compaction.core.messages import ToolCall
from litellm_compaction.engine import RECALL, Outcome, PreparedRequest
from litellm_compaction.errors import Overflow, is_crash
from litellm_compaction.proxy.answer.calls import Calls
from litellm_compaction.proxy.answer.chunks import REASONING_FIELDS
from litellm_compaction.proxy.answer.endings import (
    FULL_RATIO,
    GIVES_WAY,
    NEAR_FULL_RATIO,
    End,
    Judged,
    judged,
    most_tokens,
)
from litellm_compaction.proxy.answer.one_answer import Progress
from litellm_compaction.proxy.answer.protocol import Asked, Chunk, UpstreamError
from litellm_compaction.proxy.answer.sse import ERROR_BYTES, broken, unreadable
from litellm_compaction.proxy.wire import Usage, usage_of
from litellm_compaction.tokens.counter import GeneratedTokens

# From here on nothing is sent that could not be taken back: text ends at a word, tool calls are complete.
_DANGER_RATIO = 0.80
_DANGER_OUTPUT_RATIO = 0.60
_CALL_ROOM_TOKENS = 4096
_KNOWN_FIELDS = frozenset({"role", "content", "tool_calls", *REASONING_FIELDS})
_CHOICE_FIELDS = frozenset({"index", "delta", "finish_reason", "logprobs"})
_KEPT_REASONING_CHARS = 40_000
_NO_CHOICE = object()
_WORTH_A_RESTART_TOKENS = 32
# No model writes so many windows full, however wrong our count is; nor does a server send so many pieces.
_ENDLESS_RATIO = 4


@dataclass(frozen=True, slots=True)
class LegBound:
    """The most that a leg may have.

    Attributes:
        tokens: its `max_tokens`.
        asked_tokens: the rest of the client's own limit; None without one.
        is_share: it is only its part of the window, because of others.
        is_doubted: it is less than the window leaves by our count, since nothing has confirmed that.
        is_at_line: it ends at the streaming line, and the window has room behind that.
    """

    tokens: int
    asked_tokens: int | None = None
    is_share: bool = False
    is_doubted: bool = False
    is_at_line: bool = False


class Relay:
    """The reader of one leg's stream.

    Attributes:
        beside: choices of the last chunk that are not the answer, for which nobody has asked; they go on as they came.
        has_company: others in its context can end it at any moment: nothing is sent that ends inside a word.
        is_inside_a_word: the sent text may end inside a word, since no other answer shared the window then.
        usage_fields: the usage with all its fields, and `ending_fields` those of the last choice, as the server wrote
            them.
        answer_id: the server's name for what it is writing.
        judged: an overflow that the server has told.
        refusal: the form of the overflow, in one word for logs.
    """

    def __init__(
        self,
        progress: Progress,
        prepared: PreparedRequest,
        asked: Asked,
        bound: LegBound,
        *,
        streaming_ratio: float,
        most_thoughts_tokens: float,
    ) -> None:
        self._progress = progress
        self._asked = asked
        self.bound = bound
        self._most_thoughts_tokens = most_thoughts_tokens
        self._most_prompt_tokens = most_tokens(prepared)
        self._window_tokens = prepared.window.tokens
        self._prompt_tokens = prepared.count.tokens
        self._stop_tokens: float = int(streaming_ratio * prepared.window.tokens)
        self._generated = GeneratedTokens(prepared.count_text)
        partial, shown = progress.sent_text, prepared.shown
        self._joiner = Joiner(partial, shown=shown, is_trusted=prepared.is_trusted) if partial else None
        # A trusted way is judged all the same: a server may be updated.
        self._judge = Joiner(partial, shown=shown) if partial and prepared.is_trusted else self._joiner
        self._echo_tokens = 0
        self._tail: list[str] = []
        self._calls = Calls(RECALL if prepared.tools is not None else None)
        # OpenAI's older `function_call`, which goes on as it comes.
        self._has_old_call = False
        self._received = 0
        # Of the choice that is the answer.
        self._index: object = _NO_CHOICE
        self.beside: Sequence[Chunk] = ()
        self._pieces = 0
        self.has_company = False
        window_left = _DANGER_RATIO * self._window_tokens - self._prompt_tokens
        self._danger_tokens = min(window_left, _DANGER_OUTPUT_RATIO * bound.tokens)
        self.usage: Usage | None = None
        self.usage_fields: Mapping[str, Any] = {}
        self.ending_fields: Mapping[str, Any] = {}
        self.finish_reason: str | None = None
        self.answer_id = ""
        self.end: End | None = None
        self.is_inside_a_word = False
        self.judged: Judged | None = None
        self.refusal = ""
        self.error: UpstreamError | None = None

    def take(self, chunk: Chunk) -> list[Chunk]:
        """The deltas to send for `chunk`; sets `end` when the stream has to be stopped."""
        if chunk.get("error"):
            self._fail_inside(chunk)
            return []
        if chunk.get("usage") is not None:
            self._take_usage(chunk)
        choices = chunk.get("choices") or ()
        if self._index is _NO_CHOICE and choices:
            self._index = choices[0].get("index")
        choice = next((each for each in choices if each.get("index") == self._index), None)
        self.beside = [each for each in choices if each is not choice] if len(choices) > 1 or choice is None else []
        if choice is None:
            return []
        self.answer_id = str(chunk.get("id") or "")
        if choice.get("finish_reason"):
            self.finish_reason = choice["finish_reason"]
            self.ending_fields = {key: value for key, value in choice.items() if key not in _CHOICE_FIELDS and value}
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return []
        deltas = [*self._reasoning(delta), *self._text(delta), *self._tool_calls(delta)]
        if others := self._others(delta):
            deltas = [{**deltas[0], **others}, *deltas[1:]] if deltas else [others]
        self._pieces += bool(deltas)
        if max(self._generated.tokens, self._pieces) > _ENDLESS_RATIO * self._window_tokens:
            self.end, self.error = "failed", unreadable("its answer does not end")
        elif self.used_tokens() >= self._stop_tokens and self.can_be_cut and self.finish_reason is None:
            self.end = "limit"
        elif self._generated.tokens >= self._most_thoughts_tokens and self.finish_reason is None:
            self._most_thoughts_tokens = math.inf
            text = self._progress.sent_text + "".join(self._tail)
            if self.can_be_cut and (text or self._progress.reasoning) and is_only_thoughts(text):
                self.end = "overthought"
        return deltas

    def flush(self) -> list[Chunk]:
        return [] if self._breaks_off() or self._is_broken else self.surrendered(has_calls=True)

    def surrendered(self, *, has_calls: bool = False) -> list[Chunk]:
        """Everything that is held, but for calls of our own tool, and for the client's unless it `has_calls`."""
        text = self._taken_tail()
        if self._joiner is not None:
            text += self._joiner.finish(is_complete=self.finish_reason == "stop")
        deltas = self._sent({"content": text}) if text else []
        calls = self._calls.given_up()
        return [*deltas, *_one_by_one(calls)] if has_calls else deltas

    def closed_thoughts(self) -> list[Chunk]:
        """The end of the thoughts inside which the text stops, so that the rest is none; [] elsewhere."""
        return self._sent({"content": f"\n{THINK_END}\n\n"}) if open_think(self._progress.sent_text) else []

    def whole_calls(self) -> list[Chunk]:
        """The held calls but the last, in which the stream was cut."""
        return _one_by_one(self._calls.whole())

    def finish(self) -> None:
        """Judges a stream that ended by itself."""
        if self.end is not None:
            return
        if self._received == 0 and self._looks_full(FULL_RATIO if self.usage else NEAR_FULL_RATIO):
            self.end, self.refusal = "overflow", "empty_stream"
        elif self._breaks_off():
            # By now the server has told how much room there is for more.
            has_room = self.bound.is_doubted and self.filled_tokens < self._stop_tokens
            self.end = "spent" if self.bound.is_share or has_room else "limit"
        elif self._index is _NO_CHOICE:
            self.end, self.error = "failed", unreadable("its answer is empty")
        elif self._is_broken:
            self.end, self.error = "failed", broken()
        else:
            self.end = "done"

    @property
    def _is_broken(self) -> bool:
        """Returns True if the stream ended within a call, and nobody says why."""
        return self.finish_reason is None and not self._calls.are_whole

    def drop(self, error: UpstreamError) -> list[Chunk]:
        """Judges a stream whose connection broke; what is held goes out if only the connection's end was missing."""
        flushed = self.flush() if self.finish_reason is not None else []
        self.finish()
        if self.finish_reason is None and self.end in ("done", "failed"):
            self.end, self.error = "failed", error
        return flushed

    def fail(self, error: UpstreamError) -> None:
        """Judges a stream that ended with the server's error, or did not begin."""
        if not self._has_overflowed(error):
            self.end, self.error = "failed", error

    def spend(self) -> None:
        """Counts its end as that of a share of the window, behind which it may go on as it is."""
        self.end = "spent"

    def _has_overflowed(self, error: UpstreamError) -> bool:
        """Returns True if the server's error means that the window is full; takes note of it."""
        used_tokens = self._most_prompt_tokens + self.completion_tokens()
        found = judged(error.text, self._asked.client_text, used_tokens=used_tokens, window_tokens=self._window_tokens)
        if found is None and is_crash(error.text) and self._looks_full(NEAR_FULL_RATIO):
            found = Judged(Overflow(None, None), teaches=False)
        if found is None:
            return False
        self.judged = found
        self.end, self.error = "overflow", error
        named = "error_event" if error.is_inside else f"http_{error.status}" if error.status else "error"
        self.refusal = "crash" if is_crash(error.text) else named
        return True

    def completion_tokens(self) -> int:
        """As reported, else as counted."""
        return self.usage.completion_tokens if self.usage is not None else self._generated.exact()

    @property
    def generated_tokens(self) -> int:
        return self._generated.tokens

    @property
    def is_full(self) -> bool:
        """Returns True if the window, and not a share of it, has ended the answer."""
        return self.end == "overflow" or self._looks_full(_DANGER_RATIO)

    def looks_nearly_full(self) -> bool:
        """Returns True if prompt and answer alone fill so much of the window that this explains its end."""
        return self._looks_full(NEAR_FULL_RATIO)

    def stop(self) -> None:
        """Ends the stream because others need its room; a call that the client has begun to get may finish."""
        if self.end is None and not self.is_stuck and self.finish_reason is None:
            self.end = "called_back"

    def thinks_on(self, tokens: int) -> None:
        """Goes on after its budget is spent, for so many tokens at most."""
        self.end, self._most_thoughts_tokens = None, self._generated.tokens + tokens

    def go_on_to_the_end(self) -> None:
        """Stops no more: nothing would be gained by it, and the server's own limit is the end."""
        self.end, self._stop_tokens = None, math.inf

    @property
    def gives_way(self) -> bool:
        """Returns True if the stream has ended because others need the room, or for doubt: not for its own length."""
        return self.end in GIVES_WAY

    @property
    def is_stopped_by_us(self) -> bool:
        """Returns True if the stream could still go on: neither the server nor an error has ended it."""
        return self.end in ("limit", "called_back", "overthought")

    @property
    def is_left_running(self) -> bool:
        """Returns True if we ended the stream: the server learns of it a moment later."""
        return (self.gives_way or self.is_stopped_by_us) and self.finish_reason is None

    @property
    def can_be_cut(self) -> bool:
        """Returns False within a call, which could not go on later."""
        return not (self._calls or self._has_old_call)

    @property
    def lost_tokens(self) -> int:
        """Generated tokens that the client never gets: cut calls, ours, and text that the joiner took out.

        No more than their share of what the server has counted: a client's limit is in the server's tokens.
        """
        lost = self.cut_call_tokens + self._removed_tokens() + self.recall_tokens
        written = self._generated.exact() + (self._echo_tokens if self._has_generated_echo() else 0)
        return min(lost, lost * self.completion_tokens() // max(written, 1))

    @property
    def cut_call_tokens(self) -> int:
        """Tokens of the calls that were cut before the client had any of them: they would have to be written again."""
        return sum(self._generated.of(call.text) for call in self._calls.held) if self.end != "done" else 0

    @property
    def recall_tokens(self) -> int:
        """Tokens of the calls of our own tool."""
        return sum(self._generated.of(call.text) for call in self._calls.ours)

    def _removed_tokens(self) -> int:
        if self._joiner is None:
            return 0
        echo_tokens = self._echo_tokens if self._has_generated_echo() else 0
        return min(echo_tokens + self._generated.of(self._joiner.removed_text), self.completion_tokens())

    def outcome(self) -> Outcome | None:
        """The lesson about the stream's way; None for none."""
        opening = self._judge.opening if self._judge is not None else "undecided"
        if opening == "undecided":
            return None
        return "began_anew" if opening == "anew" or self._has_generated_echo() else "went_on"

    def _has_generated_echo(self) -> bool:
        """Returns True if the model has repeated the text that the server was shown, by the server's own number."""
        if self.usage is None or not self._echo_tokens:
            return False
        return self.usage.completion_tokens >= self._generated.exact() + self._echo_tokens / 2

    @property
    def has_begun(self) -> bool:
        return self._received > 0

    def used_tokens(self) -> int:
        """Of the window, as far as we can count."""
        return self._prompt_tokens + self._generated.tokens

    @property
    def filled_tokens(self) -> int:
        """Of the window in the end: as the server says, else as we count."""
        if self.usage is None:
            return self.used_tokens()
        return self.usage.prompt_tokens + self.usage.completion_tokens

    @property
    def is_stuck(self) -> bool:
        """Returns True if going on would repeat a call that the client has begun to receive."""
        return self._calls.has_begun or self._has_old_call

    @property
    def has_calls(self) -> bool:
        """Returns True if the model calls a tool of the client's."""
        return bool(self._calls.clients) or self._has_old_call

    @property
    def recalls(self) -> list[ToolCall]:
        """The calls of our own tool that are whole."""
        is_whole = self.end == "done" and self.finish_reason != "length"
        return [
            ToolCall(
                id=call.id or _made_id(self._progress.lookups + at, "".join(call.arguments)),
                name=RECALL,
                arguments="".join(call.arguments),
            )
            for at, call in enumerate(self._calls.ours if is_whole else ())
        ]

    @property
    def only_recalls(self) -> bool:
        """Returns True if the client has no call to answer: the model waits for ours."""
        return bool(self.recalls) and not self.has_calls

    @property
    def has_whole_calls(self) -> bool:
        """Returns True if the client has whole calls, since the cut one came later and is held."""
        return self.is_stuck and bool(self._calls.held)

    def _breaks_off(self) -> bool:
        """Returns True if the answer ended because the window did, not because the model or the client wanted it to.

        Nor the server: a limit of its own or of its operator's, far below ours, ends the next request as well.
        """
        if self.finish_reason == "length":
            if not (self._fills_its_limit() or self.has_company or self._looks_full(NEAR_FULL_RATIO)):
                return False
            removed = self._removed_tokens()
            # A few words that were taken out are not worth another request.
            generated = self.completion_tokens() - (removed if removed >= _WORTH_A_RESTART_TOKENS else 0)
            asked = self.bound.asked_tokens
            return asked is None or self.bound.tokens < asked or generated + 1 < asked
        return self.finish_reason is None and self._looks_full(NEAR_FULL_RATIO)

    def _fills_its_limit(self) -> bool:
        # LM Studio 0.4.22 reports one token less than the limit (lmstudio-bug-tracker 2335).
        is_reported = self.usage is not None and self.usage.completion_tokens + 1 >= self.bound.tokens
        return is_reported or self._generated.exact() >= NEAR_FULL_RATIO * self.bound.tokens

    def _looks_full(self, ratio: float) -> bool:
        prompt = self.usage.prompt_tokens if self.usage is not None else self._prompt_tokens
        return prompt + self.completion_tokens() >= ratio * self._window_tokens

    def _fail_inside(self, chunk: Chunk) -> None:
        said = chunk.get("error")
        code = said.get("code") if isinstance(said, Mapping) else None
        # The server has accepted the request: without a number of its own it failed over its work.
        status = code if isinstance(code, int) else HTTPStatus.INTERNAL_SERVER_ERROR
        self.fail(UpstreamError(json.dumps(said, default=str)[:ERROR_BYTES], chunk, status=status, is_inside=True))

    def _reasoning(self, delta: Mapping[str, Any]) -> list[Chunk]:
        found = {name: text for name in REASONING_FIELDS if isinstance(text := delta.get(name), str) and text}
        if not found:
            return []
        # A server that fills both says the same in each.
        text = next(iter(found.values()))
        self._count(text)
        self._progress.reasoning = (self._progress.reasoning + text)[-_KEPT_REASONING_CHARS:]
        return [found]

    def _text(self, delta: Mapping[str, Any]) -> list[Chunk]:
        text = delta.get("content")
        if not isinstance(text, str) or not text:
            return []
        self._count(text)
        if self._joiner is not None:
            text = self._joined(self._joiner, text)
        holds_words = self.has_company or self.is_near_the_end()
        if holds_words and text.isspace():
            # It goes out with the next word, and is not looked at again with each blank.
            self._tail.append(text)
            return []
        text = self._taken_tail() + text
        settled = unstopped_length(text, self._asked.stops)
        if holds_words:
            settled = settled_length(text[:settled])
        if settled < len(text):
            self._tail.append(text[settled:])
        if not settled:
            return []
        self.is_inside_a_word = not holds_words
        return self._sent({"content": text[:settled]})

    def _taken_tail(self) -> str:
        held, self._tail = "".join(self._tail), []
        return held

    def _joined(self, joiner: Joiner, text: str) -> str:
        had_echo = bool(joiner.echoed_text)
        if self._judge is not None and self._judge is not joiner:
            self._judge.feed(text)
        text = joiner.feed(text)
        if joiner.echoed_text and not had_echo:
            # The server repeats the text that it was shown; nothing of that has been generated.
            self._echo_tokens = self._generated.of(joiner.echoed_text)
            self._generated = GeneratedTokens(self._generated.of)
            self._generated.add(text)
        return text

    def _tool_calls(self, delta: Mapping[str, Any]) -> list[Chunk]:
        fragments = delta.get("tool_calls") or ()
        if not fragments:
            return []
        for fragment in fragments:
            function = fragment.get("function") or {}
            self._count(f"{function.get('name') or ''}{function.get('arguments') or ''}")
        held = self._taken_tail()
        deltas = self._sent({"content": held}) if held else []
        has_room = self.bound.tokens - self._generated.tokens >= _CALL_ROOM_TOKENS
        may_begin = has_room and not (self._asked.is_whole or self.is_near_the_end())
        sent = self._calls.take(fragments, may_begin=may_begin)
        return [*deltas, {"tool_calls": sent}] if sent else deltas

    def _others(self, delta: Mapping[str, Any]) -> Chunk:
        """Fields of some servers only, as they came: a refusal, annotations, OpenAI's older `function_call`."""
        others = {
            key: value
            for key, value in delta.items()
            # Parts of an answer that are no text stay as they came.
            if value and (key not in _KNOWN_FIELDS or (key == "content" and not isinstance(value, str)))
        }
        if isinstance(call := others.get("function_call"), dict):
            self._count(f"{call.get('name') or ''}{call.get('arguments') or ''}")
            self._has_old_call = True
        elif isinstance(refusal := others.get("refusal"), str):
            self._count(refusal)
        return others

    def _take_usage(self, chunk: Chunk) -> None:
        usage = usage_of(chunk)
        if usage is not None:
            self.usage, self.usage_fields = usage, dict(chunk["usage"])

    def is_near_the_end(self) -> bool:
        """Returns True if the window may end soon; our count of generated tokens may be off by a quarter."""
        return self.finish_reason == "length" or self._generated.tokens >= self._danger_tokens

    def _sent(self, delta: Chunk) -> list[Chunk]:
        self._progress.text.append(delta["content"])
        return [delta]

    def _count(self, text: str) -> None:
        self._received += 1
        self._generated.add(text)


def _one_by_one(calls: Sequence[Chunk]) -> list[Chunk]:
    # As servers send them; LlamaIndex reads the first call of an event only (llms-openai 0.6, `update_tool_calls`).
    return [{"tool_calls": [call]} for call in calls]


def _made_id(number: int, arguments: str) -> str:
    """An id for a call without one, in the form that Mistral's templates ask for: nine letters and digits."""
    return hashlib.blake2b(f"{number} {arguments}".encode(errors="replace")).hexdigest()[:9]
