"""`litellm-compaction records`: the stored records as a list, one of them, and its end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from textwrap import indent

import click

from litellm_compaction.cli.stores import Opened, at_store
from litellm_compaction.engine.records import View, undo, view_of
from litellm_compaction.errors import ConfigError, StoreError
from litellm_compaction.master_key import KEY_VARIABLE
from litellm_compaction.stores import StoredCompaction, digest


@click.command()
@click.option("--text", is_flag=True, help="Show the conversation's text, too, if originals are kept.")
@click.option("--undo", "forget", is_flag=True, help="Forget the record, and those that go on from it.")
@click.argument("record", required=False)
@at_store
async def records(opened: Opened, record: str | None, text: bool, forget: bool) -> int:
    """List the stored compactions, show one, or forget one.

    The list has no text. RECORD is an id as this list, `events` and the header x-litellm-compaction-record show it;
    its beginning will do. After --undo a conversation is sent as it is, while it fits.
    """
    known, unreadable = await opened.store.compactions(), len(await opened.store.unreadable())
    if record is None:
        if text or forget:
            raise ConfigError("name the record whose text is shown, or that is forgotten; `records` lists them")
        print("\n".join(_table(known, unreadable)))
        return 0
    found = [stored for stored in known if stored.id.startswith(record)]
    if len(found) != 1:
        more = f"; {_unreadable(unreadable)}" if unreadable else ""
        raise StoreError(f"{len(found) or 'no'} records have an id that begins with {record!r}{more}")
    if forget:
        print(f"{await undo(opened.store, found[0])} records forgotten.")
        return 0
    view = await view_of(found[0], opened.store, opened.originals)
    print("\n".join(_lines(view, text=text)))
    return 0


def _unreadable(number: int) -> str:
    return (
        f"{number} records cannot be read: they are not encrypted with the master key that this command knows. Set "
        f"{KEY_VARIABLE} to the proxy's, or name its config.yaml (--config); `purge` deletes them without it"
    )


def _table(known: Sequence[StoredCompaction], unreadable: int) -> Iterator[str]:
    if unreadable:
        yield f"{_unreadable(unreadable)}."
    if not known:
        yield from () if unreadable else ["No records yet."]
        return
    yield f"{'id':16}  {'scope':8}  {'made':16}  {'used':16}  {'round':>5}  {'covers':>6}  {'by':8}  {'bytes':>9}"
    for stored in known:
        made, used = (time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in (stored.created_s, stored.used_s))
        numbers = f"{stored.compaction.round:5}  {stored.compaction.covered_messages:6}  {stored.compaction.level:8}"
        yield f"{stored.id:16}  {stored.scope[:8]:8}  {made}  {used}  {numbers}  {stored.size_bytes:9,}"
    total_bytes = sum(stored.size_bytes for stored in known)
    yield f"{len(known)} records, {total_bytes:,} bytes, {len({stored.scope for stored in known})} scopes"


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
    for pair in view.pairs:
        yield f"[{pair.number}] {pair.role}: {pair.fate}{', pinned' if pair.is_pinned else ''}"
        yield indent(pair.before, "    ")
        if pair.fate == "shorter":
            yield f"  after:\n{indent(pair.after, '    ')}"
