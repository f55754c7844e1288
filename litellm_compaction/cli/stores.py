"""`litellm-compaction events`, `records`, `recall` and `purge`: the commands on a store."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import click

from litellm_compaction.cli.config_file import ConfigFile, read_config
from litellm_compaction.config import Settings, settings_from
from litellm_compaction.engine.records import RecordView, undo, view_of
from litellm_compaction.errors import ConfigError, StoreError
from litellm_compaction.events import event_from_json, harmless
from litellm_compaction.master_key import KEY_VARIABLE, known_master_key
from litellm_compaction.places import ENVIRONMENT_PREFIX
from litellm_compaction.proxy.litellm_inside import redis_of
from litellm_compaction.recall import found_fields, indexed, search, told
from litellm_compaction.stores import Originals, Store, StoredCompaction, open_store, originals_of
from litellm_compaction.stores.rows import Row

_UNIT_S = {"": 86_400.0, "d": 86_400.0, "h": 3600.0, "m": 60.0}


class Opened(NamedTuple):
    """An opened store, and the originals beside it."""

    store: Store
    originals: Originals


def at_store(command: Callable[..., Coroutine[Any, Any, int]]) -> Callable[..., int]:
    """Adds the options that say which store is meant; the command gets it, and both are closed after it."""

    @click.option("--store", metavar="URL", help="The store, if it is neither the config's nor the user's own.")
    @click.option("--config", type=click.Path(path_type=Path), metavar="PATH", help="The proxy's config.yaml.")
    @functools.wraps(command)
    def with_store(store: str | None, config: Path | None, **options: Any) -> int:
        file = None if config is None else read_config(config)
        settings = settings_from(None if file is None else file.settings)
        if store:
            settings = settings.model_copy(update={"store": store})

        async def run() -> int:
            async with opened_store(settings.with_store(os.environ), file, os.environ) as opened:
                return await command(opened, **options)

        return asyncio.run(run())

    return with_store


_scope = click.option("--scope", metavar="S", help="One scope alone, as `records` shows it; its beginning will do.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON: one object a line.")


@contextlib.asynccontextmanager
async def opened_store(
    settings: Settings, file: ConfigFile | None, environ: Mapping[str, str]
) -> AsyncIterator[Opened]:
    """The store that settings name, to be looked at.

    Raises:
        ConfigError: there is no home folder.
        StoreError: the store lives in a proxy's memory, or its scheme is not known.
    """
    # Each row asks for it.
    secret = functools.cache(functools.partial(_secret, file, environ))
    store = open_store(
        settings.store,
        ttl_s=settings.store_ttl_s,
        max_bytes=settings.store_max_bytes,
        environ=environ,
        redis=redis_of(file.data if file else {}),
        secret=secret,
        is_proxy=False,
    )
    ttl_s, max_bytes = settings.originals_ttl_s, settings.originals_max_bytes
    originals = originals_of(store, ttl_s=ttl_s, max_bytes=max_bytes, secret=secret)
    async with contextlib.aclosing(store), contextlib.aclosing(originals):
        yield Opened(store, originals)


def _secret(file: ConfigFile | None, environ: Mapping[str, str]) -> str | None:
    written = None if file is None else file.section("general_settings").get("master_key")
    if not isinstance(written, str):
        return known_master_key(environ)
    if not written.startswith(ENVIRONMENT_PREFIX):
        return written
    return environ.get(written.removeprefix(ENVIRONMENT_PREFIX))


def whole_scope(beginning: str | None, scopes_kept: Iterable[str]) -> str | None:
    """Returns the one scope that begins so, or None for None; a StoreError says that none does, or several do."""
    if beginning is None:
        return None
    scopes = {scope for scope in scopes_kept if scope.startswith(beginning)}
    if len(scopes) != 1:
        raise StoreError(f"{len(scopes) or 'no'} scopes begin with {beginning!r}; `records` lists them")
    return scopes.pop()


@click.command()
@click.option("--last", type=click.IntRange(1, 100_000), default=50, metavar="N", help="The number of events.")
@_json
@at_store
async def events(opened: Opened, last: int, as_json: bool) -> int:
    """Show what was compacted, when and why.

    These are the events that the proxies keep in their store, oldest first. They hold no text of a conversation.
    """
    found = await opened.store.events(limit=last)
    if not found and not as_json:
        print("No events yet.")
    for row in found:
        if as_json:
            # Another program's line is none.
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                print(json.dumps({"number": row.number, **json.loads(row.text)}, ensure_ascii=False))
            continue
        event, when = event_from_json(row.text), time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.when_s))
        line = "(written by another version)" if event is None else harmless(event.log_line)
        print(f"{when}  {getattr(event, 'compaction_id', '') or '-':16}  {line}")
    return 0


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
    in_store, unreadable = await opened.store.compactions(), len(await opened.store.unreadable())
    if record is None:
        if text or forget:
            raise ConfigError("name the record whose text is shown, or that is forgotten; `records` lists them")
        print("\n".join(_table(in_store, unreadable)))
        return 0
    chosen = [stored for stored in in_store if stored.id.startswith(record)]
    if len(chosen) != 1:
        more = f"; {_unreadable(unreadable)}" if unreadable else ""
        raise StoreError(f"{len(chosen) or 'no'} records have an id that begins with {record!r}{more}")
    if forget:
        print(f"{await undo(opened.store, chosen[0])} records forgotten.")
        return 0
    view = await view_of(chosen[0], opened.store, opened.originals)
    print("\n".join(_lines(view, text=text)))
    return 0


def _unreadable(number: int) -> str:
    return (
        f"{number} records cannot be read: they are not encrypted with the master key that this command knows. Set "
        f"{KEY_VARIABLE} to the proxy's, or name its config.yaml (--config); `purge` deletes them without it"
    )


def _table(in_store: Sequence[StoredCompaction], unreadable: int) -> Iterator[str]:
    if unreadable:
        yield f"{_unreadable(unreadable)}."
    if not in_store:
        yield from () if unreadable else ["No records yet."]
        return
    yield f"{'id':16}  {'scope':8}  {'made':16}  {'used':16}  {'round':>5}  {'covers':>6}  {'by':8}  {'bytes':>9}"
    for stored in in_store:
        made, used = (time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in (stored.created_s, stored.used_s))
        numbers = f"{stored.compaction.round:5}  {stored.compaction.covered_messages:6}  {stored.compaction.level:8}"
        yield f"{stored.id:16}  {stored.scope[:8]:8}  {made}  {used}  {numbers}  {stored.size_bytes:9,}"
    total_bytes = sum(stored.size_bytes for stored in in_store)
    yield f"{len(in_store)} records, {total_bytes:,} bytes, {len({stored.scope for stored in in_store})} scopes"


def _lines(view: RecordView, *, text: bool) -> Iterator[str]:
    stored, compaction = view.stored, view.stored.compaction
    yield f"record    {stored.id}"
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
        yield f"[{pair.number}] {pair.role}: {pair.fate}"
        yield indent(pair.before, "    ")
        if pair.fate == "shorter":
            yield f"  after:\n{indent(pair.after, '    ')}"


@click.command()
@_scope
@click.option("--last", type=click.IntRange(1, 100), default=5, metavar="N", help="The number of hits at most.")
@_json
@click.argument("query")
@at_store
async def recall(opened: Opened, query: str, scope: str | None, last: int, as_json: bool) -> int:
    """Search the messages that compactions covered.

    It shows text, of all tenants. QUERY is words, ids, a handle or code. The master key that encrypts the messages is
    the config's, otherwise LITELLM_MASTER_KEY, otherwise the one in the data folder.
    """
    stretches = await opened.originals.scan()
    if not stretches:
        raise StoreError("there are no originals here that can be read; `keep_originals: compacted` keeps them")
    only = whole_scope(scope, (stretch.scope for stretch in stretches))
    index = indexed(stretch for stretch in stretches if only in (None, stretch.scope))
    found = search(index, query, limit=last)
    print(json.dumps(found_fields(found), ensure_ascii=False) if as_json else told(found))
    return 0


def _age_s(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    """The seconds of an age such as `30d`; a number alone is one of days."""
    if value is None:
        return None
    if (parts := re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) *([dhm]?)", value, re.ASCII)) is None:
        raise click.BadParameter(f"{value!r} is no age: write 30d (days), 12h (hours) or 45m (minutes).")
    return float(parts[1]) * _UNIT_S[parts[2]]


@click.command()
@_scope
@click.option("--older-than", callback=_age_s, metavar="AGE", help="Those unused for so long: 30d, 12h, 45m.")
@click.option("--all", "everything", is_flag=True, help="Everything, with the history.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@at_store
async def purge(opened: Opened, scope: str | None, older_than: float | None, everything: bool, yes: bool) -> int:
    """Delete stored compactions and their originals.

    It says how many it deletes, and asks first.
    """
    if everything == (scope is not None or older_than is not None):
        raise ConfigError("name what to delete: --scope and --older-than, one or both, or --all alone")
    store, originals = opened
    before_s = None if older_than is None else time.time() - older_than
    rows: list[StoredCompaction | Row] = [*await store.compactions(), *await store.unreadable()]
    scopes = {row.scope for row in rows} | await originals.scopes()
    scope = whole_scope(scope, scopes)
    doomed = [row for row in rows if scope in (None, row.scope) and (before_s is None or row.used_s < before_s)]
    print(f"This deletes {len(doomed)} of {len(rows)} records, and the originals that they cover.")
    if scope is None:
        what = "all facts and events" if before_s is None else "the facts and events of that time"
        print(f"It deletes {what}, too, and copies of damaged files.")
    if not yes and not sys.stdin.isatty():
        raise ConfigError("nobody can be asked here; add --yes")
    if not (yes or click.confirm("Delete them?")):
        print("Nothing was deleted.")
        return 1
    parts = await originals.delete(scope=scope, unused_since_s=before_s)
    records = await store.delete(scope=scope, unused_since_s=before_s)
    print(f"{records} records and {parts} parts of originals deleted.")
    return 0
