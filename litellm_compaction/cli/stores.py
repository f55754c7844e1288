"""`litellm-compaction events`, `recall` and `purge`, and the choice of the store for a command."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from litellm_compaction.cli.config_file import ConfigFile, read_config
from litellm_compaction.config import Settings, settings_from
from litellm_compaction.errors import ConfigError, StoreError
from litellm_compaction.events import HarmlessRecords, event_from_json, log_observer
from litellm_compaction.master_key import known_master_key
from litellm_compaction.places import ENVIRONMENT_PREFIX
from litellm_compaction.proxy.litellm_inside.connections import redis_of
from litellm_compaction.recall import checked, found_fields, indexed, search, shown_to_people
from litellm_compaction.stores import (
    Originals,
    Store,
    StoredCompaction,
    open_existing,
    originals_of,
)
from litellm_compaction.stores.rows import Row

_MOST = 10**9
_DAY_S = 86_400
NONE_KEPT = "there are no originals here that can be read; `keep_originals: compacted` keeps them"


class Opened(NamedTuple):
    """An opened store, and the originals beside it."""

    store: Store
    originals: Originals

    async def aclose(self) -> None:
        await self.originals.aclose()
        await self.store.aclose()


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
        opened = opened_store(settings.with_store(os.environ), file, os.environ)

        async def closing() -> int:
            try:
                return await command(opened, **options)
            finally:
                await opened.aclose()

        return asyncio.run(closing())

    return with_store


_scope = click.option("--scope", metavar="S", help="One scope alone, as `records` shows it; its beginning will do.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON: one object a line.")


def opened_store(settings: Settings, file: ConfigFile | None, environ: Mapping[str, str]) -> Opened:
    """The store that settings name, to be looked at.

    Raises:
        ConfigError: there is no home folder.
        StoreError: the store lives in a proxy's memory, or its scheme is not known.
    """
    # Each row asks for it.
    secret = cache(partial(_secret, file, environ))
    store = open_existing(
        settings.store,
        ttl_s=settings.store_ttl_s,
        max_bytes=settings.store_max_bytes,
        environ=environ,
        redis=redis_of({} if file is None else file.data),
        secret=secret,
    )
    originals = originals_of(
        store, ttl_s=settings.originals_ttl_s, max_bytes=settings.originals_max_bytes, secret=secret
    )
    return Opened(store, originals)


def _secret(file: ConfigFile | None, environ: Mapping[str, str]) -> str | None:
    written = None if file is None else file.section("general_settings").get("master_key")
    if not isinstance(written, str):
        return known_master_key(environ)
    if not written.startswith(ENVIRONMENT_PREFIX):
        return written
    return environ.get(written.removeprefix(ENVIRONMENT_PREFIX))


def whole_scope(beginning: str | None, known: Iterable[str]) -> str | None:
    """Returns the one scope that begins so; None for None.

    Raises:
        StoreError: none does, or several do.
    """
    if beginning is None:
        return None
    scopes = {scope for scope in known if scope.startswith(beginning)}
    if len(scopes) != 1:
        raise StoreError(f"{len(scopes) or 'no'} scopes begin with {beginning!r}; `records` lists them")
    return scopes.pop()


@click.command()
@click.option("--last", type=click.IntRange(1, _MOST), default=50, metavar="N", help="The number of events.")
@_json
@at_store
async def events(opened: Opened, last: int, as_json: bool) -> int:
    """Show what was compacted, when and why.

    These are the events that the proxies keep in their store, oldest first. They hold no text of a conversation.
    """
    found = await opened.store.events(limit=last)
    if not found and not as_json:
        print("No events yet.")
    logger = logging.Logger("events")
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.addFilter(HarmlessRecords())
    observe = log_observer(logger)
    for each in found:
        event = event_from_json(each.text)
        if as_json:
            print(json.dumps({"number": each.number, **json.loads(each.text)}, ensure_ascii=False))
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.when_s))
        print(f"{when}  {getattr(event, 'compaction_id', '') or '-':16}  ", end="", flush=True)
        if event is None:
            print("(written by another version)")
        else:
            observe(event)
    return 0


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
        raise StoreError(NONE_KEPT)
    only = whole_scope(scope, (stretch.scope for stretch in stretches))
    index = indexed(stretch for stretch in stretches if only in (None, stretch.scope))
    found = search(index, checked(query), limit=last)
    print(json.dumps(found_fields(found), ensure_ascii=False) if as_json else shown_to_people(found))
    return 0


@click.command()
@_scope
@click.option("--older-than", type=click.FloatRange(0), metavar="DAYS", help="Those that were unused for so long.")
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
    before_s = None if older_than is None else time.time() - older_than * _DAY_S
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
