"""`litellm-compaction show` and `undo`: one record, with `--text` beside the messages that it covers; and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from litellm_compaction.cli.stores import named
from litellm_compaction.core.prompts import one_line_topic
from litellm_compaction.engine.records import Pair, View, view_of
from litellm_compaction.engine.records import pin as pin_message
from litellm_compaction.engine.records import undo as undo_record
from litellm_compaction.errors import ConfigError
from litellm_compaction.events import harmless
from litellm_compaction.stores import Originals, Store, StoredCompaction, digest

_INSET = "    "


def show(store: Store, originals: Originals | None, *, beginning: str, text: bool) -> int:
    """Prints the record whose id begins so; ends the store and the originals; 0.

    Args:
        text: with the text of the conversation, as far as originals of it are kept.

    Raises:
        StoreError: the store cannot be read, or has none such, or several.
    """
    view = asyncio.run(_view(store, originals, beginning))
    print("\n".join(harmless(line, keep="\n\t") for line in _lines(view, text=text)))
    return 0


async def _view(store: Store, originals: Originals | None, beginning: str) -> View:
    try:
        return await view_of(await _found(store, beginning), store, originals)
    finally:
        if originals is not None:
            await originals.aclose()
        await store.aclose()


def undo(store: Store, originals: Originals | None, *, beginning: str, focus: str = "") -> int:
    """Forgets the record whose id begins so, with those that go on from it; ends the store and the originals; 0.

    Args:
        focus: the topic with which it is made anew at the next request; "" if it is not.

    Raises:
        ConfigError: the focus is too long.
        StoreError: the store cannot be written, or has none such, or several.
    """
    try:
        topic = one_line_topic(focus)
    except ValueError as error:
        raise ConfigError(f"--focus has {error}") from None
    print(f"{asyncio.run(_undone(store, originals, beginning, topic))} records forgotten.")
    return 0


async def _undone(store: Store, originals: Originals | None, beginning: str, focus: str) -> int:
    try:
        return await undo_record(store, await _found(store, beginning), focus=focus)
    finally:
        if originals is not None:
            await originals.aclose()
        await store.aclose()


def pin(store: Store, originals: Originals | None, *, beginning: str, number: int, remove: bool) -> int:
    """Pins a message that a record covers, or takes the pin away; ends the store and the originals; 0.

    Args:
        number: of the message, as `show --text` has it.

    Raises:
        BadWish: the message cannot be pinned, or too much is.
        StoreError: the store cannot be written, or has no such record, or several.
    """
    asyncio.run(_pinned(store, originals, beginning, number, remove=remove))
    print(f"Message {number} {'is pinned no more' if remove else 'stays verbatim from the next request on'}.")
    return 0


async def _pinned(store: Store, originals: Originals | None, beginning: str, number: int, *, remove: bool) -> None:
    try:
        view = await view_of(await _found(store, beginning), store, originals)
        await pin_message(store, view, number, wanted=not remove)
    finally:
        if originals is not None:
            await originals.aclose()
        await store.aclose()


async def _found(store: Store, beginning: str) -> StoredCompaction:
    return named(await store.compactions(), len(await store.unreadable()), beginning)


def _lines(view: View, *, text: bool) -> Iterator[str]:
    stored, compaction = view.stored, view.stored.compaction
    yield f"record    {stored.id}"
    yield f"digest    {digest(compaction)}"
    yield f"scope     {stored.scope}"
    yield f"round     {compaction.round}, {compaction.level}, window {compaction.window_tokens:,} tokens"
    yield f"covers    {compaction.covered_messages} messages after the system prompt"
    for event in view.events[-1:]:
        tokens = f"{event.tokens_before:,} → {event.tokens_after:,} of {event.window_tokens:,} tokens"
        yield f"applied   {len(view.events)} times, the last time by {event.model}: {tokens}"
    if not text:
        yield "\n--text shows its words, and the messages before and after."
        return
    yield f"\n--- the record\n{compaction.record}"
    yield "\n--- messages before and after"
    if view.why_incomplete:
        yield view.why_incomplete
    yield from map(_pair, view.pairs)


def _pair(pair: Pair) -> str:
    pinned = ", pinned" if pair.is_pinned else ""
    shown = f"[{pair.number}] {pair.role}: {pair.fate}{pinned}\n{_inset(pair.before)}"
    return shown if pair.fate != "shorter" else f"{shown}\n  after:\n{_inset(pair.after)}"


def _inset(text: str) -> str:
    return "\n".join(_INSET + line for line in text.splitlines())
