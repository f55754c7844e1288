"""Puts what is to be said of a compaction before what the model says, in a stream of either protocol."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeAlias

from litellm_compaction.proxy.standards.orders import Told

Event: TypeAlias = dict[str, Any]


class Form(Protocol):
    """A protocol's stream.

    Attributes:
        at_once: kinds of events that are no part of what the model says.
        at_end: kinds of those that come behind it.
        index: the field with the place of an event's part in the answer.
    """

    at_once: frozenset[str]
    at_end: frozenset[str]
    index: str

    def events(self, frame: object) -> Iterable[object]:
        """Returns the events of a frame of LiteLLM's, as dictionaries; as they came where they cannot be read."""

    def frame(self, event: Event) -> Any:
        """Returns an event as LiteLLM sends it on."""

    def part(self, told: Told) -> list[Event]:
        """Returns the events of the part that says it, at place 0; none if there is none."""

    def ended(self, event: Event, told: Told | None) -> Event:
        """Returns an event of the end with what is to be said there."""


async def with_part(
    frames: AsyncIterator[Any], form: Form, made: Callable[[], Awaitable[Told | None]], is_settled: Callable[[], bool]
) -> AsyncGenerator[Any, None]:
    """Yields a stream with a part of ours before what the model says, or in its place.

    Args:
        made: what is to be said; None for nothing.
        is_settled: the request was sent, so that `made` knows. What comes before that waits.
    """
    waiting: list[Event] = []
    told: Told | None = None
    is_known = is_alone = False
    shift = 0

    def shifted(event: Event) -> Any:
        at = event.get(form.index)
        return form.frame({**event, form.index: at + shift} if isinstance(at, int) else event)

    async for frame in frames:
        for event in form.events(frame):
            kind = event.get("type") if isinstance(event, dict) else None
            if not isinstance(event, dict) or kind in form.at_once:
                yield form.frame(event) if isinstance(event, dict) else event
                continue
            has_ended = kind in form.at_end
            if not is_known and (has_ended or is_settled()):
                is_known, told = True, await made() if is_settled() else None
                part = [] if told is None else form.part(told)
                is_alone, shift = told is not None and told.is_alone, 1 if part else 0
                for own in part:
                    yield form.frame(own)
                for early in () if is_alone else waiting:
                    yield shifted(early)
            if has_ended:
                yield form.frame(form.ended(event, told))
            elif not is_known:
                waiting.append(event)
            elif not is_alone:
                yield shifted(event)
