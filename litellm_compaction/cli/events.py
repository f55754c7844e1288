"""`litellm-compaction events`: what was compacted, when and why."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

from litellm_compaction.events import CarryEvent, CompactionEvent, TruncationAlarm, event_from_json, harmless
from litellm_compaction.stores import Store, StoredEvent

_POLL_S = 0.5


async def _wait() -> None:
    await asyncio.sleep(_POLL_S)


def events(store: Store, *, last: int, follow: bool, as_json: bool, wait: Callable[[], Awaitable[None]] = _wait) -> int:
    """Prints the history, oldest first, and ends the store; 0.

    Args:
        last: how many events to begin with.
        follow: go on with new ones until interrupted.
        as_json: one JSON object a line.
        wait: returns when it is time to look again.

    Raises:
        StoreError: the store cannot be read.
    """
    return asyncio.run(_print(store, last=last, follow=follow, as_json=as_json, wait=wait))


async def _print(store: Store, *, last: int, follow: bool, as_json: bool, wait: Callable[[], Awaitable[None]]) -> int:
    try:
        found = await store.events(limit=last)
        if not found and not follow and not as_json:
            print("No events yet.")
        newest = 0
        while True:
            for event in found:
                print(harmless(_as_json(event) if as_json else _as_line(event)), flush=True)
            if not follow:
                return 0
            newest = found[-1].number if found else newest
            await wait()
            found = await store.events(after=newest)
    finally:
        await store.aclose()


def _as_json(stored: StoredEvent) -> str:
    try:
        fields = json.loads(stored.text)
    except ValueError:
        fields = None
    return json.dumps({"number": stored.number, **(fields if isinstance(fields, dict) else {})}, ensure_ascii=False)


def _as_line(stored: StoredEvent) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stored.when_s))
    event = event_from_json(stored.text)
    if event is None:
        return f"{when}  (written by another version)"
    if isinstance(event, TruncationAlarm):
        return (
            f"{when}  truncation_alarm  {event.model}  server saw {event.reported_tokens:,} of "
            f"{event.expected_tokens:,} tokens, window {event.window_tokens:,}, {event.reason}"
        )
    if isinstance(event, CarryEvent):
        return (
            f"{when}  {event.outcome}  {event.model}  answer cut at {event.tokens_before:,} of "
            f"{event.window_tokens:,} tokens after {event.attempt} of {event.attempts} restarts"
        )
    return f"{when}  {event.outcome}  {event.model}  {', '.join(_parts(event))}"


def _parts(event: CompactionEvent) -> list[str]:
    parts = [
        f"{event.tokens_before:,} → {event.tokens_after:,} of {event.window_tokens:,} tokens",
        event.phase,
    ]
    if event.round:
        parts.append(f"round {event.round} ({event.rung}), {event.covered_messages} messages covered")
    if event.summary_calls:
        calls = "call" if event.summary_calls == 1 else "calls"
        parts.append(f"{event.summary_calls} summary {calls} of {event.pruning_model} in {event.summary_ms:,.0f} ms")
    parts.append(f"{event.duration_ms:,.0f} ms")
    if event.compaction_id:
        parts.append(f"id {event.compaction_id}" + (f" after {event.continues_id}" if event.continues_id else ""))
    if event.reason:
        parts.append(f"reason {event.reason}" + (f" ({event.refusal})" if event.refusal else ""))
    return parts
