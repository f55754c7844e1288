"""How full the context was, turn by turn: the last conversations of this process, for the page's plots.

Numbers only, in memory only. A conversation is known by a keyed hash of how it begins, under a key that ends with the
process (promise P9). Told by `calls.py` what goes out, by the restart loop what came back.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from litellm_compaction.core.messages import Message, lead_length
from litellm_compaction.engine import Case, Guarded

_MAX_CONVERSATIONS = 48
_MAX_TURNS = 120
_MAX_MODELS = 512
# Enough to tell conversations apart, little enough to hash on the event loop.
_OPENING_CHARS = 2048


class Drop(NamedTuple):
    """A restart in mid-answer: the context before and after, in tokens."""

    before_tokens: int
    after_tokens: int


@dataclass(slots=True)
class Turn:
    """One client request.

    Attributes:
        when_s: wall clock, seconds since 1970.
        before_tokens: the prompt as it came, estimated.
        prompt_tokens: as it was sent; the server's own number as soon as it said one.
        filled_tokens: prompt and answer; `prompt_tokens` until the answer is there.
        restarts: in the order in which they happened.
    """

    when_s: float
    before_tokens: int
    prompt_tokens: int
    filled_tokens: int
    window_tokens: int
    action: Literal["none", "reused", "compacted"] = "none"
    restarts: list[Drop] = field(default_factory=list)


@dataclass(slots=True)
class Talk:
    """One conversation, its newest turn last.

    Attributes:
        id: a name for people; says nothing about the text.
        model: `model_name` that was asked.
        tenant: whose it is, as in events.
        count: turns so far; more than `turns` holds once the oldest are forgotten.
        length: messages of the newest turn.
        compact_ratio, carry_ratio: shares of the window at which a prompt is compacted and an answer carried over.
    """

    id: str
    model: str
    tenant: str
    compact_ratio: float
    carry_ratio: float
    count: int = 0
    length: int = 0
    turns: deque[Turn] = field(default_factory=lambda: deque(maxlen=_MAX_TURNS))


class Accuracy(NamedTuple):
    """The last answer's usage beside our count of the same prompt."""

    counted_tokens: int
    reported_tokens: int
    when_s: float

    @property
    def deviation_percent(self) -> float:
        """How far our count was from the server's; above 0 where it was too high."""
        return 100.0 * (self.counted_tokens / self.reported_tokens - 1)


class Turns:
    """The turns of the last conversations; the least recent ones are forgotten."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._key = secrets.token_bytes(16)
        self._talks: OrderedDict[str, Talk] = OrderedDict()
        self._accuracies: OrderedDict[str, Accuracy] = OrderedDict()

    def sent(self, turn: Turn | None, messages: Sequence[Message], case: Case, guarded: Guarded) -> Turn | None:
        """Notes what goes out for a client request; gives the turn that it belongs to, None where it has no messages.

        Args:
            turn: of the same request, if something went out for it before.
            messages: as the client sent them.
            case: of the request.
            guarded: what goes out.
        """
        if turn is None:
            talk = self._talk(messages, case)
            if talk is None:
                return None
            tokens = guarded.count.tokens
            turn = Turn(self._wall_clock(), guarded.tokens_before, tokens, tokens, guarded.window.tokens)
            talk.turns.append(turn)
        if guarded.messages and guarded.messages[-1].is_ours:
            turn.restarts.append(Drop(_stopped_at(turn, case, guarded), guarded.count.tokens))
        elif guarded.action == "compacted" or turn.action == "none":
            turn.action = guarded.action
        turn.window_tokens = guarded.window.tokens
        turn.prompt_tokens = turn.filled_tokens = guarded.count.tokens
        return turn

    def answered(
        self, turn: Turn | None, case: Case, guarded: Guarded, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Notes what an answer's usage says about what was sent."""
        if prompt_tokens <= 0:
            return
        self._accuracies[case.target.key] = Accuracy(guarded.count.tokens, prompt_tokens, self._wall_clock())
        self._accuracies.move_to_end(case.target.key)
        while len(self._accuracies) > _MAX_MODELS:
            self._accuracies.popitem(last=False)
        if turn is not None:
            turn.prompt_tokens = prompt_tokens
            turn.filled_tokens = prompt_tokens + max(completion_tokens, 0)

    def accuracy(self, target_key: str) -> Accuracy | None:
        """How far off the last count for a target was."""
        return self._accuracies.get(target_key)

    def talks(self) -> list[Talk]:
        """The conversations, the most recent first."""
        return list(reversed(self._talks.values()))

    def _talk(self, messages: Sequence[Message], case: Case) -> Talk | None:
        rest = messages[lead_length(messages) :]
        if not rest:
            return None
        opening = repr((case.tenant, case.label, rest[0].role, len(rest[0].text), rest[0].text[:_OPENING_CHARS]))
        name = hashlib.blake2b(opening.encode(errors="replace"), key=self._key, digest_size=8).hexdigest()
        talk = self._talks.get(name)
        # Fewer messages than before: another conversation that begins with the same words.
        if talk is None or len(rest) < talk.length:
            talk = self._talks[name] = Talk(
                name[:6], case.label, case.tenant, case.settings.pre_request_ratio, case.settings.streaming_ratio
            )
        talk.compact_ratio, talk.carry_ratio = case.settings.pre_request_ratio, case.settings.streaming_ratio
        talk.count += 1
        talk.length = len(rest)
        self._talks.move_to_end(name)
        while len(self._talks) > _MAX_CONVERSATIONS:
            self._talks.popitem(last=False)
        return talk


def _stopped_at(turn: Turn, case: Case, guarded: Guarded) -> int:
    """How full the context was when an answer was stopped, in tokens.

    Nobody reports the usage of a stopped answer. `tokens_before` is the client's whole conversation, which was never
    sent where it had been compacted before; the limit at which answers are stopped is what is certain then.
    """
    limit = int(case.settings.streaming_ratio * guarded.window.tokens)
    return max(turn.filled_tokens, guarded.tokens_before if guarded.tokens_before <= guarded.window.tokens else limit)
