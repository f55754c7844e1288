"""How full the context was, turn by turn: the last conversations, for the page's plots.

Numbers only. A conversation is known by a hash of how it begins, keyed with the proxy's own secret (promise P9). What
this process has seen is in its memory, and a second later in the store, where the other workers' parts are too. Told by
`calls.py` what goes out, by the restart loop what came back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from litellm_compaction.core.messages import Message, lead_length
from litellm_compaction.engine import Case, Guarded
from litellm_compaction.proxy.talks import Drop, Talk, Turn, joined, talk_from_json, talk_to_json
from litellm_compaction.stores import Plot, Store

_MAX_CONVERSATIONS = 48
_MAX_MODELS = 512
# Enough to tell conversations apart, little enough to hash on the event loop.
_OPENING_CHARS = 2048
# What other workers may not know yet; a busy conversation is written no more often.
_WRITE_EVERY_S = 1.0


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
        self._talks: OrderedDict[str, Talk] = OrderedDict()
        self._accuracies: OrderedDict[str, Accuracy] = OrderedDict()
        self._unwritten: set[str] = set()
        self._writing: asyncio.Task[None] | None = None

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
            turn = Turn(
                self._wall_clock(),
                guarded.tokens_before,
                tokens,
                tokens,
                guarded.window.tokens,
                messages=len(messages) - lead_length(messages),
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

    def _talk(self, messages: Sequence[Message], case: Case) -> Talk | None:
        rest = messages[lead_length(messages) :]
        if not rest:
            return None
        opening = repr((case.tenant, case.label, rest[0].role, len(rest[0].text), rest[0].text[:_OPENING_CHARS]))
        name = hashlib.blake2b(opening.encode(errors="replace"), key=self._name_key(), digest_size=8).hexdigest()
        ratios = case.settings.pre_request_ratio, case.settings.streaming_ratio
        talk = self._talks.setdefault(name, Talk(name, case.label, case.tenant, *ratios))
        talk.compact_ratio, talk.carry_ratio = ratios
        self._talks.move_to_end(name)
        while len(self._talks) > _MAX_CONVERSATIONS:
            self._talks.popitem(last=False)
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


def _stopped_at(turn: Turn, case: Case, guarded: Guarded) -> int:
    """How full the context was when an answer was stopped, in tokens.

    Nobody reports the usage of a stopped answer. `tokens_before` is the client's whole conversation, which was never
    sent where it had been compacted before; the limit at which answers are stopped is what is certain then.
    """
    limit = int(case.settings.streaming_ratio * guarded.window.tokens)
    return max(turn.filled_tokens, guarded.tokens_before if guarded.tokens_before <= guarded.window.tokens else limit)
