"""Knows by which ways each server goes on with an answer: by its kind, and by how it has done so far.

`continuing` asks it when an answer is carried over the limit; `doctor` shows it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias, get_args

from pydantic import TypeAdapter, ValidationError

from litellm_compaction.concurrency import Bounded, Tasks
from litellm_compaction.core.continuation.request import (
    Way,
)
from litellm_compaction.core.messages import JsonValue
from litellm_compaction.stores import FACTS_SCOPE, Facts
from litellm_compaction.windows.lmstudio import server_root
from litellm_compaction.windows.windows import Source, Target, server_of

logger = logging.getLogger("litellm_compaction")

# What a continuation teaches: it began with something new, or with what the server was shown; the answer began anew;
# the server does not take such a request. One over which it fails teaches nothing.
Outcome: TypeAlias = Literal["went_on", "began_anew", "refused"]

ALL_WAYS: tuple[Way, ...] = get_args(Way)
# For people.
WAYS_IN_WORDS: Mapping[Way, str] = {
    "raw": "the model goes on inside its answer, by a prompt that is rendered here",
    "prefill": "the answer's end is the last message, which the server goes on with",
    "turn": "the model is asked to go on in the user's place",
}
# LM Studio goes on with a last message of the assistant (lmstudio-bug-tracker 2041) and puts no template around the
# prompt of a text completion (its documentation, "Completions"); so does llama.cpp (15 of 15 and 8 of 8 answers,
# 2026-11), and vLLM if it is told to (`continue_final_message`).
_LMSTUDIO: frozenset[Source] = frozenset(("api/v1", "api/v0"))
# A server that was updated may do what it did not do before.
_FORGET_S = 24 * 3600.0
_STORE_TIMEOUT_S = 2.0
# Two outcomes of one clock's moment follow one another.
_LATER_S = 1e-3
# One is a slip, two are not.
_MOST_FAILURES = 4
# Wildcard deployments get their model names from clients, so the number of servers and models needs an end.
_MAX_KNOWN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The times at which one way has led on at one server, and at which it has not; s since 1970, 0 for never.

    Times, not numbers: those of several processes are one record, in any order of writing.

    Attributes:
        went_on_s: last.
        refused_s: when the server last did not take such a request.
        failed_s: when it led nowhere, a refusal included; the newest few.
    """

    went_on_s: float = 0.0
    refused_s: float = 0.0
    failed_s: tuple[float, ...] = ()

    @property
    def has_gone_on(self) -> bool:
        """At least once, and since it was last refused: no server takes such a request only now and then."""
        return self.went_on_s > self.refused_s

    @property
    def failures(self) -> int:
        return sum(when_s > self.went_on_s for when_s in self.failed_s)

    @property
    def last_failed_s(self) -> float:
        return max(self.failed_s, default=0.0)

    def is_good(self, now_s: float) -> bool:
        """It is worth a try: a single repeat that the model meant does not outweigh what went well."""
        return self.failures <= self.has_gone_on or now_s - self.last_failed_s > _FORGET_S

    def after(self, outcome: Outcome, now_s: float) -> Record:
        now_s = max(now_s, self.went_on_s + _LATER_S, self.last_failed_s + _LATER_S)
        if outcome == "went_on":
            return replace(self, went_on_s=now_s)
        refused_s = now_s if outcome == "refused" else self.refused_s
        return replace(self, refused_s=refused_s, failed_s=(*self.failed_s, now_s)[-_MOST_FAILURES:])

    def joined(self, other: Record) -> Record:
        failed_s = sorted({*self.failed_s, *other.failed_s})[-_MOST_FAILURES:]
        return Record(
            went_on_s=max(self.went_on_s, other.went_on_s),
            refused_s=max(self.refused_s, other.refused_s),
            failed_s=tuple(failed_s),
        )


Records: TypeAlias = dict[Way, Record]
_RECORDS = TypeAdapter(Records)


def parsed(text: str) -> Records:
    """Returns one server's records, for one model; none if `text` cannot be theirs."""
    try:
        return _RECORDS.validate_json(text)
    except ValidationError:
        return {}


def written(records: Records) -> str:
    return _RECORDS.dump_json(dict(sorted(records.items()))).decode()


def _joined(one: Records, other: Records) -> Records:
    return {way: one.get(way, Record()).joined(other.get(way, Record())) for way in {*one, *other}}


def joined(kept: str, seen: str) -> str:
    """Returns two processes' records of a server as one."""
    return written(_joined(parsed(kept), parsed(seen)))


class Standing(NamedTuple):
    """The ways of a server to go on: those that are worth a try, best first, and of these those that it has shown."""

    ways: tuple[Way, ...] = ()
    gone_on: tuple[Way, ...] = ()

    def among(self, continued: Collection[Way]) -> Standing:
        return Standing(*(tuple(way for way in each if way in continued) for each in self))

    def in_words(self) -> str:
        """The best way for people; "" for none."""
        if not self.ways:
            return ""
        best = self.ways[0]
        return f"{best}: {WAYS_IN_WORDS[best]}{', as it has done' if best in self.gone_on else ''}"


class KnownWays:
    def __init__(self, store: Facts, wall_clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._wall_clock = wall_clock
        self._known: Bounded[str, Records] = Bounded(_MAX_KNOWN)
        self._writing = Tasks()

    async def ways(self, target: Target, source: Source) -> tuple[Way, ...]:
        """Returns the ways that are worth a try, best first; the last one always is.

        `source` tells the window's size.
        """
        records = await self.records(target)
        now_s = self._wall_clock()
        possible = ALL_WAYS if can_go_on_itself(target, source) else ("turn",)
        return tuple(way for way in possible if way == "turn" or records.get(way, Record()).is_good(now_s))

    async def has_gone_on(self, target: Target, way: Way) -> bool:
        record = (await self.records(target)).get(way, Record())
        return record.has_gone_on and not record.failures

    async def standing(self, target: Target, source: Source, *, can_render: bool) -> Standing:
        """As `ways`; without `can_render` prompts cannot be rendered here to the letter."""
        ways = tuple(way for way in await self.ways(target, source) if can_render or way != "raw")
        return Standing(ways, tuple([way for way in ways if await self.has_gone_on(target, way)]))

    async def records(self, target: Target) -> Records:
        """Returns a server's records; read from the store once."""
        key = fact_key(target)
        if (known := self._known.get(key)) is not None:
            return known
        text = None
        try:
            text = await asyncio.wait_for(self._store.get_fact(FACTS_SCOPE, key), _STORE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - what is only remembered must not harm an answer (P8)
            logger.debug("going_on_not_read %s", type(error).__name__)
        return self._known.setdefault(key, parsed(text or "{}"))

    async def learn(self, target: Target, label: str, way: Way, outcome: Outcome) -> None:
        """Takes note of a continuation's outcome; it is written in the background. `label` is for logs."""
        known = await self.records(target)
        now_s = self._wall_clock()
        before = known.get(way, Record())
        after = before.after(outcome, now_s)
        key = fact_key(target)
        self._known[key] = {**known, way: after}
        if before.is_good(now_s) and not after.is_good(now_s):
            logger.warning("going_on model=%s way=%s outcome=%s; the next way is used", label, way, outcome)
        if _change_key(after) != _change_key(before):
            self._writing.begin(self._write(key))

    async def aclose(self) -> None:
        """Ends writing; call before the store is closed."""
        await asyncio.gather(*self._writing, return_exceptions=True)

    async def _write(self, key: str) -> None:
        try:
            merge = self._store.merge_fact(FACTS_SCOPE, key, written(self._known.get(key, {})), joined)
            both = await asyncio.wait_for(merge, _STORE_TIMEOUT_S)
            self._known[key] = _joined(self._known.get(key, {}), parsed(both))
        except Exception as error:  # noqa: BLE001 - as when reading
            logger.debug("going_on_not_kept %s", type(error).__name__)


def _change_key(record: Record) -> tuple[bool, int, float]:
    """The part of a record that decides; that a way has led on once more is not written down."""
    return record.has_gone_on, record.failures, record.last_failed_s if record.failures else 0.0


def can_go_on_itself(target: Target, source: Source) -> bool:
    """Returns True for a server of a kind that goes on with an answer itself."""
    server = server_of(source)
    return target.is_lmstudio or source in _LMSTUDIO or (server is not None and server.continues)


def without_thoughts(target: Target, source: Source, family: str) -> Mapping[str, JsonValue]:
    """Returns the fields of a request's body that have a server think no more; empty if none is known.

    LM Studio takes `reasoning_effort: none` on chats since 0.4.17 (its bug tracker 2057, by the vendor); gpt-oss knows
    no other efforts than low, medium and high.
    """
    if target.is_lmstudio or source in _LMSTUDIO:
        return MappingProxyType({"reasoning_effort": "low" if family == "gpt-oss" else "none"})
    server = server_of(source)
    return server.no_thoughts if server is not None else MappingProxyType({})


def fact_key(target: Target) -> str:
    """The name under which a server's records are kept: the same for all deployments that lead there."""
    server = server_root(target.api_base) if target.api_base else target.key
    return "going_on:" + hashlib.blake2b(f"{server} {target.model}".encode(), digest_size=12).hexdigest()
