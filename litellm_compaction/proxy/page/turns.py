"""Keeps the fill of the context, turn by turn, for the page's plots.

A turn is one line of a log in the store, written when the server has counted its answer. Its conversation is known by a
hash of its beginning, keyed with the proxy's own secret (promise P9).
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, NamedTuple, TypeAlias

from pydantic import Field, TypeAdapter

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.messages import Message, system_prefix_length
from litellm_compaction.engine import Action, PreparedRequest, RequestContext

_MAX_MODELS = 512
# Enough to tell conversations apart, little enough to hash on the event loop.
_OPENING_CHARS = 2048
_MOST_PROGRAM_CHARS = 40
_Tokens: TypeAlias = Annotated[int, Field(ge=0, le=1_000_000_000)]
_Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]


class Drop(NamedTuple):
    """A restart in mid-answer: the context before and after."""

    before_tokens: _Tokens
    after_tokens: _Tokens


@dataclass(slots=True, kw_only=True)
class Turn:
    """One client request.

    Attributes:
        talk: its conversation's name, the same in all workers.
        model: `model_name` that was asked.
        tenant: as in events.
        when_s: wall clock when it was sent, seconds since 1970.
        messages: their number, without the leading system ones.
        before_tokens: the prompt as it came, estimated.
        prompt_tokens: as it was sent; the server's own number after the answer.
        filled_tokens: prompt and answer.
        compact_ratio, carry_ratio: the settings' shares of the window: above them a prompt with room for its answer
            is compacted, and an answer carried over.
        program: the client's, by its own word: `OpenAI/Python`; "" if it says none.
    """

    talk: str
    model: str
    tenant: str
    when_s: _Number
    messages: int
    before_tokens: _Tokens
    prompt_tokens: _Tokens
    filled_tokens: _Tokens
    window_tokens: _Tokens
    compact_ratio: _Number
    carry_ratio: _Number
    action: Action = "none"
    program: str = ""
    restarts: list[Drop] = field(default_factory=list)


class Talk(NamedTuple):
    """One conversation: at least one turn, the newest last."""

    turns: list[Turn]

    @property
    def newest(self) -> Turn:
        return self.turns[-1]

    @property
    def id(self) -> str:
        return self.newest.talk[:6]

    @property
    def is_eventful(self) -> bool:
        """There is more to see than one bar."""
        return len(self.turns) > 1 or self.newest.action == "compacted" or bool(self.newest.restarts)


class Accuracy(NamedTuple):
    """The last answer's usage and our count of the same prompt."""

    counted_tokens: int
    reported_tokens: int

    @property
    def deviation_percent(self) -> float:
        """Above 0 if our count was too high."""
        return 100.0 * (self.counted_tokens / self.reported_tokens - 1)


_ADAPTER = TypeAdapter(Turn)


def turn_to_json(turn: Turn) -> str:
    return json.dumps(asdict(turn), separators=(",", ":"))


def turn_from_json(text: str) -> Turn | None:
    """None if this version cannot read it."""
    try:
        return _ADAPTER.validate_python(json.loads(text))
    except (ValueError, RecursionError):
        return None


def talks_of(turns: Iterable[Turn]) -> list[Talk]:
    """The conversations of some turns, the most recent first.

    A turn with fewer messages than the one before it begins another conversation that opens alike. Of several lines
    for one turn, which it has after a restart, the last one counts.
    """
    talks: dict[str, Talk] = {}
    for turn in sorted(turns, key=lambda each: each.when_s):
        seen = talks.setdefault(turn.talk, Talk([])).turns
        if seen and turn.messages < seen[-1].messages:
            seen.clear()
        if seen and turn.when_s == seen[-1].when_s:
            seen.pop()
        seen.append(turn)
    return sorted(talks.values(), key=lambda talk: (-talk.newest.when_s, talk.newest.talk))


class Turns:
    """Writes down the turns of this process, and remembers for each model how far off the last count was.

    Args:
        write: keeps a line with its time, without waiting for it.
        secret: gives the one that all workers have; without one (None) each names conversations its own way.
    """

    def __init__(
        self,
        write: Callable[[float, str], None],
        *,
        secret: Callable[[], str | None] = lambda: None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._write = write
        self._secret = secret
        self._wall_clock = wall_clock
        self._own_secret = secrets.token_hex(16)
        self._accuracies: Bounded[str, Accuracy] = Bounded(_MAX_MODELS)

    def sent(
        self,
        turn: Turn | None,
        messages: Sequence[Message],
        context: RequestContext,
        prepared: PreparedRequest,
        program: str = "",
    ) -> Turn | None:
        """Notes the prepared request; gives the turn that it belongs to, None if it has no messages.

        Args:
            turn: of the same request, if something went out for it before.
            messages: as the client sent them.
            program: as in `Turn`.
        """
        tokens = prepared.count.tokens
        if turn is None:
            rest = messages[system_prefix_length(messages) :]
            if not rest:
                return None
            turn = Turn(
                talk=self._name(rest[0], context),
                model=context.label,
                tenant=context.tenant,
                when_s=self._wall_clock(),
                messages=len(rest),
                before_tokens=prepared.tokens_before,
                prompt_tokens=tokens,
                filled_tokens=tokens,
                window_tokens=prepared.window.tokens,
                compact_ratio=prepared.budget.line_tokens / prepared.window.tokens,
                carry_ratio=context.settings.streaming_ratio,
                program=program[:_MOST_PROGRAM_CHARS],
            )
        if prepared.messages and prepared.messages[-1].is_synthetic:
            turn.restarts.append(Drop(_stopped_at(turn, context, prepared), tokens))
        elif prepared.action == "compacted" or turn.action == "none":
            turn.action = prepared.action
        turn.window_tokens = prepared.window.tokens
        turn.prompt_tokens = turn.filled_tokens = tokens
        return turn

    def answered(
        self,
        turn: Turn | None,
        context: RequestContext,
        prepared: PreparedRequest,
        prompt_tokens: int,
        completion_tokens: int,
    ) -> None:
        """Writes the turn with the numbers of an answer's usage."""
        if prompt_tokens <= 0:
            return
        self._accuracies[context.target.key] = Accuracy(prepared.count.tokens, prompt_tokens)
        if turn is not None:
            turn.prompt_tokens = prompt_tokens
            turn.filled_tokens = prompt_tokens + max(completion_tokens, 0)
            self._write(turn.when_s, turn_to_json(turn))

    def accuracy(self, target_key: str) -> Accuracy | None:
        """None before the first answer of a target."""
        return self._accuracies.get(target_key)

    def _name(self, first: Message, context: RequestContext) -> str:
        opening = repr((context.tenant, context.label, first.role, len(first.text), first.text[:_OPENING_CHARS]))
        secret = self._secret() or self._own_secret
        key = hashlib.blake2b(b"litellm_compaction turns " + secret.encode(), digest_size=32).digest()
        return hashlib.blake2b(opening.encode(errors="replace"), key=key, digest_size=8).hexdigest()


def _stopped_at(turn: Turn, context: RequestContext, prepared: PreparedRequest) -> int:
    """The fill of the context when an answer was stopped, in tokens.

    Servers report no usage of a stopped answer. `tokens_before` is the whole conversation as the client sent it; if it
    is larger than the window, only the limit at which answers are stopped is certain.
    """
    limit = int(context.settings.streaming_ratio * prepared.window.tokens)
    return max(
        turn.filled_tokens, prepared.tokens_before if prepared.tokens_before <= prepared.window.tokens else limit
    )
