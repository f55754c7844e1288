"""Whether a server reads a whole prompt again after any change of it, by what it reports of its cache.

Told of every prompt that goes to a server, and of the `cached_tokens` in its answers' usage; asked by `measure.py` for
each request of a model of which its file and its name do not say so (`Family.rereads`).

Of two prompts in a row that begin alike, a server which keeps prefixes has the common beginning of the second one at
hand; one that cannot go back (sliding windows, running states) has only what goes on behind all of the first. So the
second one's report decides, where it is known that nothing else came in between and that the cache works: it was as
good as its word for the latest prompt that only went on. It does not matter why everything is read again: another slot,
or blocks that are too long for the beginning, cost the same. LM Studio reports nothing on chat completions
(lmstudio-bug-tracker 778), so it teaches nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TypeAlias

from litellm_compaction.concurrency import Bounded
from litellm_compaction.engine.context import PreparedRequest, RequestContext
from litellm_compaction.stores import FACTS_SCOPE, Store
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokens.count import Count, Fingerprints
from litellm_compaction.tokens.samples import Stamped, Stamps, newest, values
from litellm_compaction.windows.lmstudio import server_root
from litellm_compaction.windows.windows import Target

logger = logging.getLogger("litellm_compaction")

# So many in a row decide: one may be another program's doing.
_DECIDING = 3
# A shorter beginning says little: templates put words of their own there, and servers keep whole blocks.
LEAST_SHARED_TOKENS = 256
# Messages of the first prompt that are not in the second. One that only lost its end, an instruction for a summary, may
# be in a checkpoint at the end of the one before (llama.cpp: 432 of 436 tokens of a Mamba's, 2026-11-23). The same one
# again may be answered out of LiteLLM's own cache, with the usage of then.
_LEAST_GIVEN_UP = 2
# Of the beginning: less than this is as good as nothing, more than the other was kept.
_NOTHING_RATIO, _KEPT_RATIO = 0.1, 0.5
# With a smaller part of a prompt in common llama.cpp takes another slot (`--slot-prompt-similarity`, 0.1; common.h).
_LEAST_SHARED_RATIO = 0.1
# Caches in the cloud forget after five to ten minutes (OpenAI, "Prompt caching").
_FRESH_S = 300.0
# Two prompts' hashes each: 40 kB where they have a thousand messages.
_MAX_PLACES = 64
# Wildcard deployments get their model names from clients, so the number of models needs an end.
_MAX_KNOWN = 4096
_STORE_TIMEOUT_S = 2.0


@dataclass(slots=True)
class _Place:
    """One model at one server; times of the monotonic clock.

    Attributes:
        held: the prompt that the cache holds, by its fingerprints; empty where that is not known.
        held_s: since when.
        sent: the count of the answer's prompt that was sent last, while its answer is waited for.
        prints: of what was sent last, as far as the next prompt may go on with it.
        before: what the cache held when that was sent.
        has_hit: whether the latest prompt that only went on was found there.
    """

    held: Fingerprints = ()
    held_s: float = 0.0
    sent: Count | None = None
    prints: Fingerprints = ()
    before: Fingerprints = ()
    has_hit: bool = False

    def begin(self, prints: Fingerprints, count: Count | None, now_s: float) -> None:
        """Notes that a prompt is sent: until it has been answered nobody knows what the cache holds."""
        self.before = self.held if now_s - self.held_s <= _FRESH_S else ()
        self.held, self.prints, self.sent = (), prints, count

    def end(self, now_s: float) -> None:
        """Notes that what was sent last has been answered."""
        self.held, self.held_s = self.prints, now_s
        self.before, self.sent = (), None


Samples: TypeAlias = tuple[Stamped[bool], ...]


@dataclass(slots=True)
class _Known:
    """What a model has shown at a server.

    Attributes:
        samples: the newest changes of prompts: whether all was read again.
        is_told: whether the log says that it reads all again.
    """

    samples: Samples = ()
    is_told: bool = False

    @property
    def rereads(self) -> bool:
        """Whether all of the newest changes say so, and there were enough of them."""
        return len(self.samples) == _DECIDING and all(each.value for each in self.samples)


class CacheReports:
    """What servers say of their caches; all but `rereads` is used by the event loop only, so it needs no lock.

    A report to the contrary takes back what was learned, and never what a model's file or name says: a server that
    kept the beginning of such a prompt (llama.cpp has a few checkpoints) need not have the middle of the next one. To
    change prompts of one that does go back rarely and deep is no loss: 56,274 tokens of work in place of 97,900 over an
    agent's hundred rounds (`tests/engine/test_rereads.py`, 2026-11-23).

    Args:
        store: keeps what was learned; None where nobody will need it again.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._clock = clock
        self._stamps = Stamps(wall_clock)
        self._places: Bounded[str, _Place] = Bounded(_MAX_PLACES)
        self._known: Bounded[tuple[str, str], _Known] = Bounded(_MAX_KNOWN)
        # By what each is counted of which there is anything to learn.
        self._names: Bounded[str, str] = Bounded(_MAX_KNOWN)
        self._tasks: set[asyncio.Task[None]] = set()

    def rereads(self, target: Target, family: Family) -> bool:
        """Whether a deployment's server reads a whole prompt again after any change of it.

        Args:
            target: the deployment.
            family: of its model as it is loaded now; what another one has shown under the same name does not count.
        """
        if family.rereads:
            return True
        known = self._known.get((place_of(target), _name_of(family)))
        return known is not None and known.rereads

    def recall(self, target: Target, family: Family) -> None:
        """Notes which model a request goes to, and begins to read what was learned of it before; arguments as above."""
        place, name = place_of(target), _name_of(family)
        if family.rereads:
            # There is nothing to learn.
            self._names.pop(place, None)
            return
        self._names[place] = name
        if (place, name) not in self._known:
            known = self._known[place, name] = _Known()
            if self._store is not None:
                self._start(self._read(self._store, _fact_key(place, name), known))

    async def aclose(self) -> None:
        """Ends what is read and written; call before the store is closed."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def sending(self, case: RequestContext, guarded: PreparedRequest) -> None:
        """Notes that an answer's prompt goes out now; once or more for each.

        Args:
            case: of the request.
            guarded: what is sent.
        """
        place = self._place(case.target)
        if place.sent is not guarded.count:
            prints = guarded.count.prints
            # The answer goes on inside the last message, which will be another one in the next prompt.
            place.begin(prints[:-1] if guarded.way in ("raw", "prefill") else prints, guarded.count, self._clock())

    def asking(self, target: Target, prints: Fingerprints = ()) -> None:
        """Notes that another prompt of ours goes out: for a summary, or to be counted.

        Args:
            target: to whom.
            prints: of the prompt; without them nothing is learned from the one behind it.
        """
        self._place(target).begin(prints, None, self._clock())

    def asked(self, target: Target) -> None:
        """Notes that the server has answered what `asking` has told of."""
        self._place(target).end(self._clock())

    def learn(
        self, case: RequestContext, guarded: PreparedRequest, *, prompt_tokens: int, cached_tokens: int | None
    ) -> None:
        """Takes over what a whole answer's usage says of the cache.

        Args:
            case: of the request.
            guarded: what was sent.
            prompt_tokens: as the server counts them.
            cached_tokens: the part of them that it had in its cache; None where it does not say.
        """
        place, count = self._place(case.target), guarded.count
        if place.sent is not count:
            # Others came in between.
            return
        before = place.before
        place.end(self._clock())
        if cached_tokens is None or not before or not count.prints:
            return
        # Entry 0 stands for the tools.
        common = sum(one == other for one, other in zip(before, count.prints, strict=False)) - 1
        # Without the tools, which some templates put behind the user's words: errs low.
        shared_tokens = sum(count.sizes[: max(common, 0)])
        given_up = len(before) - 1 - common
        if given_up == 0 and len(before) < len(count.prints):
            place.has_hit = cached_tokens >= _KEPT_RATIO * shared_tokens and cached_tokens > 0
        elif given_up >= _LEAST_GIVEN_UP and shared_tokens >= LEAST_SHARED_TOKENS:
            if cached_tokens >= _KEPT_RATIO * shared_tokens:
                self._note(case, is_reread=False)
            elif (
                cached_tokens < _NOTHING_RATIO * shared_tokens
                and shared_tokens >= _LEAST_SHARED_RATIO * prompt_tokens
                and place.has_hit
                # Of other processes' prompts nothing is known here.
                and not case.has_siblings
            ):
                self._note(case, is_reread=True)

    def _note(self, case: RequestContext, *, is_reread: bool) -> None:
        place = place_of(case.target)
        name = self._names.get(place)
        if name is None:
            return
        known = self._known.setdefault((place, name), _Known())
        before = values(known.samples)
        known.samples = newest(_DECIDING, known.samples, [self._stamps.stamp(is_reread)])
        if self._store is not None and values(known.samples) != before:
            self._start(self._write(self._store, _fact_key(place, name), known))
        if known.rereads and not known.is_told:
            known.is_told = True
            logger.info(
                "rereads model=%s: after a change of a prompt the server has none of it in its cache, %d times in a "
                "row; its prompts are changed rarely and deep from now on",
                case.label,
                _DECIDING,
            )

    async def _read(self, store: Store, key: str, known: _Known) -> None:
        try:
            text = await asyncio.wait_for(store.get_fact(FACTS_SCOPE, key), _STORE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - what is only remembered must not harm an answer (P8)
            logger.debug("rereads_not_read %s", type(error).__name__)
            return
        self._take_over(known, text or "")

    async def _write(self, store: Store, key: str, known: _Known) -> None:
        try:
            merge = store.merge_fact(FACTS_SCOPE, key, as_json(known.samples), joined)
            text = await asyncio.wait_for(merge, _STORE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - as when reading
            logger.debug("rereads_not_kept %s", type(error).__name__)
            return
        self._take_over(known, text)

    def _take_over(self, known: _Known, text: str) -> None:
        known.samples = newest(_DECIDING, known.samples, _parsed(text, self._stamps))
        # Who has learned it has said it.
        known.is_told = known.is_told or known.rereads

    def _start(self, work: Coroutine[None, None, None]) -> None:
        try:
            task = asyncio.get_running_loop().create_task(work)
        except RuntimeError:
            # Nobody waits for a store outside an event loop.
            work.close()
            return
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _place(self, target: Target) -> _Place:
        name = place_of(target)
        place = self._places.setdefault(name, _Place())
        self._places.move_to_end(name)
        return place


def place_of(target: Target) -> str:
    """A model at a server: the same for all deployments that lead there."""
    return f"{server_root(target.api_base) if target.api_base else target.key} {target.model}"


def _name_of(family: Family) -> str:
    return f"{family.name}|{family.vocabulary}"


def _fact_key(place: str, name: str) -> str:
    return "rereads:" + hashlib.blake2b(f"{place} {name}".encode(), digest_size=12).hexdigest()


def as_json(samples: Samples) -> str:
    """Samples for another process."""
    return json.dumps([[each.stamp_us, each.value] for each in samples])


def joined(kept: str, learned: str, *, clock: Callable[[], float] = time.time) -> str:
    """What two processes have learned of a model at a server, each in the form of `as_json`: the newest samples."""
    stamps = Stamps(clock)
    return as_json(newest(_DECIDING, _parsed(kept, stamps), _parsed(learned, stamps)))


def _parsed(text: str, stamps: Stamps) -> Samples:
    """What `as_json` has written; without what it cannot have."""
    try:
        rows = json.loads(text)
    except (RecursionError, ValueError):
        return ()
    pairs = [row for row in rows if isinstance(row, list) and len(row) == 2] if isinstance(rows, list) else []
    read = stamps.read([value for _, value in pairs], [stamp for stamp, _ in pairs])
    return tuple(Stamped(stamp_us, value) for stamp_us, value in read if isinstance(value, bool))
