"""Knows by which ways each server goes on with an answer: by its kind, and by how it has done so far.

The compactor asks it when an answer is carried over the limit; `doctor` shows it. What a server has shown is kept in
memory: after a restart one refused try shows it again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias, get_args

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.continuation.request import Way
from litellm_compaction.core.messages import JsonValue
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
# prompt of a text completion (its documentation, "Completions"); so does llama.cpp, and vLLM if it is told to
# (`continue_final_message`).
_LMSTUDIO: frozenset[Source] = frozenset(("api/v1", "api/v0"))
# A server that was updated may do what it did not do before.
_REST_S = 24 * 3600.0
# Wildcard deployments get their model names from clients, so the number of servers and models needs an end.
_MAX_KNOWN = 4096


class Record(NamedTuple):
    """One way at one server: if it has gone on since it failed; what had not, and failed, rests from `failed_s` on.

    A single repeat that the model meant does not outweigh what went well.
    """

    has_gone_on: bool = False
    failed_s: float = -math.inf


class KnownWays:
    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._known: Bounded[tuple[str, str, Way], Record] = Bounded(_MAX_KNOWN)

    def ways(self, target: Target, source: Source) -> tuple[Way, ...]:
        """Returns the ways that are worth a try, best first; the last one always is.

        `source` tells the window's size.
        """
        possible = ALL_WAYS if can_go_on_itself(target, source) else ("turn",)
        return tuple(way for way in possible if way == "turn" or not self._rests(self._record(target, way)))

    def has_gone_on(self, target: Target, way: Way) -> bool:
        return self._record(target, way).has_gone_on

    def in_words(self, target: Target, source: Source, possible: Collection[Way]) -> str:
        """The best way of those that are `possible`, for people; "" for none."""
        best = next((way for way in self.ways(target, source) if way in possible), None)
        if best is None:
            return ""
        return f"{best}: {WAYS_IN_WORDS[best]}{', as it has done' if self.has_gone_on(target, best) else ''}"

    def learn(self, target: Target, label: str, way: Way, outcome: Outcome) -> None:
        """Takes note of a continuation's outcome; `label` is for logs."""
        before, has_gone_on = self._record(target, way), outcome == "went_on"
        fails_at_once = outcome == "refused" or not (has_gone_on or before.has_gone_on)
        after = Record(has_gone_on, self._wall_clock() if fails_at_once else -math.inf)
        self._known[_key(target, way)] = after
        if self._rests(after) and not self._rests(before):
            logger.warning("going_on model=%s way=%s outcome=%s; the next way is used", label, way, outcome)

    def _record(self, target: Target, way: Way) -> Record:
        return self._known.get(_key(target, way), Record())

    def _rests(self, record: Record) -> bool:
        return self._wall_clock() - record.failed_s <= _REST_S


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


def _key(target: Target, way: Way) -> tuple[str, str, Way]:
    """The same for all deployments that lead to one model of one server."""
    return server_root(target.api_base) if target.api_base else target.key, target.model, way
