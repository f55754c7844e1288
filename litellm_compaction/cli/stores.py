"""`litellm-compaction events`, `recall` and `purge`, and the choice of the store for a command."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Coroutine, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from litellm_compaction.cli.config_file import ConfigFile, read_config
from litellm_compaction.config import settings_from
from litellm_compaction.errors import ConfigError, StoreError
from litellm_compaction.events import CompactionEvent, event_from_json, harmless, log_observer
from litellm_compaction.master_key import known_master_key
from litellm_compaction.places import ENVIRONMENT_PREFIX
from litellm_compaction.proxy.litellm_inside.connections import redis_of
from litellm_compaction.recall import checked, found_fields, indexed, search, shown_to_people
from litellm_compaction.stores import (
    Originals,
    Store,
    StoredCompaction,
    StoredEvent,
    open_existing,
    open_originals,
)
from litellm_compaction.stores.rows import Row

_POLL_S = 0.5
NONE_KEPT = "there are no originals here that can be read; `keep_originals: compacted` keeps them"


class Place(NamedTuple):
    """A store, and the originals beside it; None for none."""

    store: Store
    originals: Originals | None

    def done(self, command: int | Coroutine[object, object, int]) -> int:
        """A command's exit code; one that has to be awaited is, and both are closed after it."""

        async def closing(waited: Coroutine[object, object, int]) -> int:
            try:
                return await waited
            finally:
                if self.originals is not None:
                    await self.originals.aclose()
                await self.store.aclose()

        return command if isinstance(command, int) else asyncio.run(closing(command))


def chosen(url: str | None, config: Path | None, environ: Mapping[str, str]) -> Place:
    """The store at `url`, else the one that `config` names, else the default one.

    Raises:
        ConfigError: the config file is wrong, or there is no home folder.
        StoreError: the store lives in a proxy's memory, or its scheme is not known.
    """
    file = None if config is None else read_config(config)
    settings = settings_from(None if file is None else file.settings)
    if url:
        settings = settings.model_copy(update={"store": url})
    settings = settings.with_store(environ)
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
    originals = open_originals(
        settings.store,
        store,
        ttl_s=settings.originals_ttl_s,
        max_bytes=settings.originals_max_bytes,
        environ=environ,
        secret=secret,
        create=False,
    )
    return Place(store, originals)


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


async def events(place: Place, *, last: int, follow: bool, as_json: bool) -> int:
    """Prints the history, the `last` events first, oldest first; 0.

    Args:
        follow: go on with new events until interrupted.

    Raises:
        StoreError: the store cannot be read.
    """
    found = await place.store.events(limit=last)
    if not found and not follow and not as_json:
        print("No events yet.")
    newest = 0
    while True:
        for event in found:
            print(harmless(_as_json(event) if as_json else _as_line(event)), flush=True)
        if not follow:
            return 0
        newest = found[-1].number if found else newest
        await asyncio.sleep(_POLL_S)
        found = await place.store.events(after=newest)


def _as_json(stored: StoredEvent) -> str:
    try:
        fields = json.loads(stored.text)
    except ValueError:
        fields = None
    return json.dumps({"number": stored.number, **(fields if isinstance(fields, dict) else {})}, ensure_ascii=False)


def _as_line(stored: StoredEvent) -> str:
    """The line that the log has for an event, with its time, and the record's id."""
    event = event_from_json(stored.text)
    lines: list[str] = []
    logger = logging.Logger("events", logging.DEBUG)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    if event is not None:
        log_observer(logger)(event)
    if isinstance(event, CompactionEvent) and event.compaction_id:
        lines.append(f"record={event.compaction_id}" + (f" after={event.continues_id}" if event.continues_id else ""))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stored.when_s))
    return f"{when}  {' '.join(lines) or '(written by another version)'}"


async def recall(place: Place, *, query: str, scope: str | None, last: int, as_json: bool) -> int:
    """Prints what is found for a query, the best first; 0.

    Args:
        scope: the beginning of the only one that is searched; None for all.
        last: as many hits at most.

    Raises:
        StoreError: there are no originals, they cannot be read, or the scope is not clear.
        QueryTooLong: with what to change.
    """
    stretches = [] if place.originals is None else await place.originals.scan()
    if not stretches:
        raise StoreError(NONE_KEPT)
    only = whole_scope(scope, (stretch.scope for stretch in stretches))
    index = indexed(stretch for stretch in stretches if only in (None, stretch.scope))
    found = search(index, checked(query), limit=last)
    print(json.dumps(found_fields(found), ensure_ascii=False) if as_json else shown_to_people(found))
    return 0


async def purge(place: Place, *, scope: str | None, older_than_s: float | None, everything: bool, yes: bool) -> int:
    """Says what it deletes, asks, and deletes it; 0, or 1 when the answer was no.

    Raises:
        ConfigError: nothing is named, or the question cannot be asked.
        StoreError: the store cannot be written.
    """
    if everything == (scope is not None or older_than_s is not None):
        raise ConfigError("name what to delete: --scope and --older-than, one or both, or --all alone")
    store, originals = place
    before_s = None if older_than_s is None else time.time() - older_than_s
    rows: list[StoredCompaction | Row] = [*await store.compactions(), *await store.unreadable()]
    scopes = {row.scope for row in rows} | (set() if originals is None else await originals.scopes())
    scope = whole_scope(scope, scopes)
    doomed = [row for row in rows if scope in (None, row.scope) and (before_s is None or row.used_s < before_s)]
    print(f"This deletes {len(doomed)} of {len(rows)} records, and the originals that they cover.")
    if scope is None:
        time_ = "all" if before_s is None else "those of that time"
        print(f"It deletes the facts and events of all scopes, too: {time_}. Copies of damaged files go with them.")
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("nobody can be asked here; add --yes")
        print("Delete them? [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("Nothing was deleted.")
            return 1
    parts = 0 if originals is None else await originals.delete(scope=scope, unused_since_s=before_s)
    records = await store.delete(scope=scope, unused_since_s=before_s)
    print(f"{records} records and {parts} parts of originals deleted.")
    return 0
