"""How full the context was, turn by turn: the last conversations, for the page's plots.

Numbers only. A conversation is known by a hash of how it begins, keyed with the proxy's own secret (promise P9). What
this process has seen is in its memory, and a second later in the store. Several workers may serve one conversation:
each keeps a row of what it has seen of it, and the page joins them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from litellm_compaction.concurrency import Bounded, ended
from litellm_compaction.core.messages import Message, system_prefix_length
from litellm_compaction.engine import Action, PreparedRequest, RequestContext
from litellm_compaction.stores import Plot, Store

MAX_TURNS = 120

_ACTIONS: tuple[Action, ...] = get_args(Action)
_MAX_CONVERSATIONS = 48
_MAX_MODELS = 512
# Enough to tell conversations apart, little enough to hash on the event loop.
_OPENING_CHARS = 2048
# What other workers may not know yet; a busy conversation is written no more often.
_WRITE_EVERY_S = 1.0


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
        messages: how many there were, without the leading system ones.
        talk: name of the conversation, as long as this process remembers it.
    """

    when_s: float
    before_tokens: int
    prompt_tokens: int
    filled_tokens: int
    window_tokens: int
    action: Action = "none"
    restarts: list[Drop] = field(default_factory=list)
    messages: int = 0
    talk: str = ""


@dataclass(slots=True)
class Talk:
    """One conversation, its newest turn last.

    Attributes:
        name: says nothing about the text; the same in all workers.
        model: `model_name` that was asked.
        tenant: whose it is, as in events.
        count: turns so far; more than `turns` holds once the oldest are forgotten.
        compact_ratio, carry_ratio: shares of the window at which a prompt is compacted and an answer carried over.
    """

    name: str
    model: str
    tenant: str
    compact_ratio: float
    carry_ratio: float
    count: int = 0
    turns: deque[Turn] = field(default_factory=lambda: deque(maxlen=MAX_TURNS))

    @property
    def id(self) -> str:
        """The name as people read it."""
        return self.name[:6]

    @property
    def last_s(self) -> float:
        """When the newest turn was; 0 without any."""
        return self.turns[-1].when_s if self.turns else 0.0

    @property
    def is_eventful(self) -> bool:
        """Whether there is more to see than one bar."""
        return self.count > 1 or any(turn.action == "compacted" or turn.restarts for turn in self.turns)

    def add(self, turn: Turn) -> None:
        """Adds a newer turn; one with fewer messages than the one before begins another conversation like this."""
        if self.turns and turn.messages < self.turns[-1].messages:
            self.turns.clear()
            self.count = 0
        self.turns.append(turn)
        self.count += 1


def talk_to_json(talk: Talk) -> str:
    """One line of numbers and names."""
    turns = [
        [
            round(turn.when_s, 3),
            turn.before_tokens,
            turn.prompt_tokens,
            turn.filled_tokens,
            turn.window_tokens,
            _ACTIONS.index(turn.action),
            turn.messages,
            turn.restarts,
        ]
        for turn in talk.turns
    ]
    fields = {
        "name": talk.name,
        "model": talk.model,
        "tenant": talk.tenant,
        "ratios": [talk.compact_ratio, talk.carry_ratio],
        "count": talk.count,
        "turns": turns,
    }
    return json.dumps(fields, separators=(",", ":"))


def talk_from_json(text: str) -> Talk | None:
    """The conversation that some version of `talk_to_json` wrote; None where this one cannot read it."""
    try:
        fields = json.loads(text)
        compact_ratio, carry_ratio = map(float, fields["ratios"])
        name, model, tenant = (str(fields[key]) for key in ("name", "model", "tenant"))
        talk = Talk(name, model, tenant, compact_ratio, carry_ratio, count=int(fields["count"]))
        talk.turns.extend(map(_turn, fields["turns"]))
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
        return None
    return talk


def joined(rows: Iterable[Talk]) -> list[Talk]:
    """The conversations that several workers have seen parts of, the most recent first."""
    by_name: dict[str, list[Talk]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    talks = [_joined(some) for some in by_name.values()]
    return sorted(talks, key=lambda talk: (-talk.last_s, talk.name))


def _joined(rows: list[Talk]) -> Talk:
    newest = max(rows, key=lambda row: row.last_s)
    if len(rows) == 1:
        return newest
    talk = Talk(newest.name, newest.model, newest.tenant, newest.compact_ratio, newest.carry_ratio)
    for turn in sorted((turn for row in rows for turn in row.turns), key=lambda turn: turn.when_s):
        talk.add(turn)
    # What the rows themselves have forgotten of this conversation.
    shown = set(map(id, talk.turns))
    talk.count += sum(row.count - len(row.turns) for row in rows if any(id(turn) in shown for turn in row.turns))
    return talk


def _turn(row: list[Any]) -> Turn:
    when_s, before, prompt, filled, window, action, messages, restarts = row
    return Turn(
        float(when_s),
        int(before),
        int(prompt),
        int(filled),
        int(window),
        action=_ACTIONS[int(action)],
        restarts=[Drop(int(one), int(other)) for one, other in restarts],
        messages=int(messages),
    )


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
    """The turns of the last conversations; the least recent ones are forgotten.

    Args:
        store: where all workers keep what they have seen; None keeps this one's in its memory.
        secret: gives the one that all workers have, None where there is none: then each names conversations its own
            way.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        secret: Callable[[], str | None] = lambda: None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._secret = secret
        self._wall_clock = wall_clock
        self._own_secret = secrets.token_hex(16)
        self._worker = secrets.token_hex(4)
        self._talks: Bounded[str, Talk] = Bounded(_MAX_CONVERSATIONS)
        self._accuracies: Bounded[str, Accuracy] = Bounded(_MAX_MODELS)
        self._unwritten: set[str] = set()
        self._writing: asyncio.Task[None] | None = None

    def sent(
        self, turn: Turn | None, messages: Sequence[Message], case: RequestContext, guarded: PreparedRequest
    ) -> Turn | None:
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
            turn = Turn(
                self._wall_clock(),
                guarded.tokens_before,
                tokens,
                tokens,
                guarded.window.tokens,
                messages=len(messages) - system_prefix_length(messages),
                talk=talk.name,
            )
            talk.add(turn)
        if guarded.messages and guarded.messages[-1].is_ours:
            turn.restarts.append(Drop(_stopped_at(turn, case, guarded), guarded.count.tokens))
        elif guarded.action == "compacted" or turn.action == "none":
            turn.action = guarded.action
        turn.window_tokens = guarded.window.tokens
        turn.prompt_tokens = turn.filled_tokens = guarded.count.tokens
        self._changed(turn)
        return turn

    def answered(
        self,
        turn: Turn | None,
        case: RequestContext,
        guarded: PreparedRequest,
        prompt_tokens: int,
        completion_tokens: int,
    ) -> None:
        """Notes what an answer's usage says about what was sent."""
        if prompt_tokens <= 0:
            return
        self._accuracies[case.target.key] = Accuracy(guarded.count.tokens, prompt_tokens, self._wall_clock())
        if turn is not None:
            turn.prompt_tokens = prompt_tokens
            turn.filled_tokens = prompt_tokens + max(completion_tokens, 0)
            self._changed(turn)

    def accuracy(self, target_key: str) -> Accuracy | None:
        """How far off the last count for a target was."""
        return self._accuracies.get(target_key)

    def talks(self) -> list[Talk]:
        """The conversations that this process has seen, the most recent first."""
        return list(reversed(self._talks.values()))

    async def everywhere(self, tenant: str = "") -> list[Talk]:
        """The conversations that any worker has seen, the most recent first.

        Args:
            tenant: whose; "" for everybody's.
        """
        known: Iterable[Talk | None] = self._talks.values()
        if self._store is not None:
            try:
                await self._write()
                known = map(talk_from_json, await self._store.plots(containing=tenant))
            except Exception:  # noqa: BLE001 - without a store the page shows what this process knows
                known = self._talks.values()
        return joined(talk for talk in known if talk is not None and (not tenant or talk.tenant == tenant))

    async def aclose(self) -> None:
        """Writes what has not been written yet; call before the store is closed."""
        await ended([self._writing] if self._writing is not None else [])
        with contextlib.suppress(Exception):
            await self._write()

    def _talk(self, messages: Sequence[Message], case: RequestContext) -> Talk | None:
        rest = messages[system_prefix_length(messages) :]
        if not rest:
            return None
        opening = repr((case.tenant, case.label, rest[0].role, len(rest[0].text), rest[0].text[:_OPENING_CHARS]))
        name = hashlib.blake2b(opening.encode(errors="replace"), key=self._name_key(), digest_size=8).hexdigest()
        ratios = case.settings.pre_request_ratio, case.settings.streaming_ratio
        talk = self._talks.setdefault(name, Talk(name, case.label, case.tenant, *ratios))
        talk.compact_ratio, talk.carry_ratio = ratios
        self._talks.move_to_end(name)
        return talk

    def _name_key(self) -> bytes:
        secret = self._secret() or self._own_secret
        return hashlib.blake2b(b"litellm_compaction turns " + secret.encode(), digest_size=32).digest()

    def _changed(self, turn: Turn) -> None:
        """Has the turn's conversation written behind the request's back."""
        if self._store is None:
            return
        self._unwritten.add(turn.talk)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write_on())

    async def _write_on(self) -> None:
        while self._unwritten:
            # Whether or not it can be kept: the next change is tried again.
            with contextlib.suppress(Exception):
                await self._write()
            await asyncio.sleep(_WRITE_EVERY_S)

    async def _write(self) -> None:
        names, self._unwritten = self._unwritten, set()
        known = [talk for name in names if (talk := self._talks.get(name)) is not None]
        plots = [Plot(f"{talk.name}.{self._worker}", talk.last_s, talk_to_json(talk)) for talk in known]
        if plots and self._store is not None:
            await self._store.put_plots(plots)


def _stopped_at(turn: Turn, case: RequestContext, guarded: PreparedRequest) -> int:
    """How full the context was when an answer was stopped, in tokens.

    Nobody reports the usage of a stopped answer. `tokens_before` is the client's whole conversation, which was never
    sent where it had been compacted before; the limit at which answers are stopped is what is certain then.
    """
    limit = int(case.settings.streaming_ratio * guarded.window.tokens)
    return max(turn.filled_tokens, guarded.tokens_before if guarded.tokens_before <= guarded.window.tokens else limit)
