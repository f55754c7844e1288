"""`litellm-compaction events`, `recall` and `store ls | show | purge`, and the choice of the store for a command."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from litellm_compaction.cli.config_file import ConfigFile, read_config
from litellm_compaction.config import settings_from
from litellm_compaction.errors import ConfigError, StoreError
from litellm_compaction.events import CompactionEvent, ContinuationEvent, TruncationAlarm, event_from_json, harmless
from litellm_compaction.master_key import KEY_VARIABLE, known_master_key
from litellm_compaction.places import ENVIRONMENT_PREFIX
from litellm_compaction.proxy.litellm_inside.connections import redis_of
from litellm_compaction.recall import checked, found_fields, indexed, search, shown_to_people
from litellm_compaction.stores import (
    Originals,
    Store,
    StoredCompaction,
    StoredEvent,
    Stretch,
    open_existing,
    open_originals,
)
from litellm_compaction.stores.rows import Row
from litellm_compaction.stores.sqlite import SqliteRows

_AGES = ((86_400, "d"), (3600, "h"), (60, "min"))
_POLL_S = 0.5
NONE_KEPT = "there are no originals here that can be read; `keep_originals: compacted` keeps them"


def chosen(url: str | None, config: Path | None, environ: Mapping[str, str]) -> tuple[Store, Originals | None]:
    """The store at `url`, else the one that `config` names, else the default one; its originals, None for none.

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
    return store, originals


def _secret(file: ConfigFile | None, environ: Mapping[str, str]) -> str | None:
    written = None if file is None else file.section("general_settings").get("master_key")
    if not isinstance(written, str):
        return known_master_key(environ)
    if not written.startswith(ENVIRONMENT_PREFIX):
        return written
    return environ.get(written.removeprefix(ENVIRONMENT_PREFIX))


async def _wait() -> None:
    await asyncio.sleep(_POLL_S)


def events(store: Store, *, last: int, follow: bool, as_json: bool, wait: Callable[[], Awaitable[None]] = _wait) -> int:
    """Prints the history, the `last` events first, oldest first, and ends the store; 0.

    Args:
        follow: go on with new events until interrupted.
        wait: returns when it is time to look again.

    Raises:
        StoreError: the store cannot be read.
    """
    return asyncio.run(_print_events(store, last=last, follow=follow, as_json=as_json, wait=wait))


async def _print_events(
    store: Store, *, last: int, follow: bool, as_json: bool, wait: Callable[[], Awaitable[None]]
) -> int:
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
    when = _time(stored.when_s)
    event = event_from_json(stored.text)
    if event is None:
        return f"{when}  (written by another version)"
    if isinstance(event, TruncationAlarm):
        return (
            f"{when}  truncation_alarm  {event.model}  server saw {event.reported_tokens:,} of "
            f"{event.expected_tokens:,} tokens, window {event.window_tokens:,}, {event.reason}"
        )
    if isinstance(event, ContinuationEvent):
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
    if event.excerpts:
        parts.append(f"{event.excerpts} excerpts of {event.excerpt_tokens:,} tokens")
    if event.summary_calls:
        calls = "call" if event.summary_calls == 1 else "calls"
        parts.append(f"{event.summary_calls} summary {calls} of {event.pruning_model} in {event.summary_ms:,.0f} ms")
    parts.append(f"{event.duration_ms:,.0f} ms")
    if event.compaction_id:
        parts.append(f"id {event.compaction_id}" + (f" after {event.continues_id}" if event.continues_id else ""))
    if event.reason:
        parts.append(f"reason {event.reason}" + (f" ({event.refusal})" if event.refusal else ""))
    return parts


def ls(store: Store) -> int:
    """Prints one line for each compaction, the most recently used first, without text; ends the store; 0.

    Raises:
        StoreError: the store cannot be read.
    """
    known, unreadable = asyncio.run(_compactions(store))
    print("\n".join(map(harmless, _table(known, unreadable))))
    return 0


def show(store: Store, beginning: str) -> int:
    """Prints the compaction whose id begins so, with its text; ends the store; 0.

    Raises:
        StoreError: the store cannot be read, or has none such, or several.
    """
    stored = named(*asyncio.run(_compactions(store)), beginning)
    print("\n".join(harmless(part, keep="\n\t") for part in _details(stored)))
    return 0


def purge(
    store: Store,
    originals: Originals | None = None,
    *,
    scope: str | None,
    older_than_s: float | None,
    everything: bool,
    ask: bool,
) -> int:
    """Deletes what is named, with its originals, after a question; ends both; 0, or 1 when the answer was no.

    Raises:
        ConfigError: nothing is named, or the question cannot be asked.
        StoreError: the store cannot be written.
    """
    if everything == (scope is not None or older_than_s is not None):
        raise ConfigError("name what to delete: --scope and --older-than, one or both, or --all alone")
    return asyncio.run(_purge(store, originals, scope=scope, older_than_s=older_than_s, ask=ask))


async def _purge(
    store: Store, originals: Originals | None, *, scope: str | None, older_than_s: float | None, ask: bool
) -> int:
    try:
        before_s = None if older_than_s is None else time.time() - older_than_s
        known: list[StoredCompaction | Row] = [*await store.compactions(), *await store.unreadable()]
        scopes = {stored.scope for stored in known} | (set() if originals is None else await originals.scopes())
        scope = whole_scope(scope, scopes)
        doomed = [
            stored
            for stored in known
            if (scope is None or stored.scope == scope) and (before_s is None or stored.used_s < before_s)
        ]
        more = ", with the facts and events of that time" if scope is None else ""
        more += "" if originals is None else ", and the originals"
        more += ", and copies of damaged files" if isinstance(store.rows, SqliteRows) else ""
        if ask and not confirmed(f"Delete {len(doomed)} of {len(known)} compactions{more}?"):
            print("Nothing was deleted.")
            return 1
        if originals is not None and (parts := await originals.delete(scope=scope, unused_since_s=before_s)):
            print(f"{parts} parts of originals deleted.")
        print(f"{await store.delete(scope=scope, unused_since_s=before_s)} compactions deleted.")
        return 0
    finally:
        if originals is not None:
            await originals.aclose()
        await store.aclose()


async def _compactions(store: Store) -> tuple[list[StoredCompaction], int]:
    try:
        return await store.compactions(), len(await store.unreadable())
    finally:
        await store.aclose()


def named(known: Iterable[StoredCompaction], unreadable: int, beginning: str) -> StoredCompaction:
    """Returns the one compaction whose id begins so.

    Args:
        unreadable: how many more there are, which cannot be read.

    Raises:
        StoreError: none does, or several do.
    """
    found = [stored for stored in known if stored.id.startswith(beginning)]
    if len(found) != 1:
        more = f"; {_unreadable(unreadable)}" if unreadable else ""
        raise StoreError(f"{len(found) or 'no'} records have an id that begins with {beginning!r}{more}")
    return found[0]


def _unreadable(number: int) -> str:
    return (
        f"{number} records cannot be read: they are not encrypted with the master key that this command knows. Set "
        f"{KEY_VARIABLE} to the proxy's, or name its config.yaml (--config); `store purge` deletes them without it"
    )


def whole_scope(beginning: str | None, known: Iterable[str]) -> str | None:
    """Returns the one scope that begins so; None for None.

    Raises:
        StoreError: none does, or several do.
    """
    if beginning is None:
        return None
    scopes = {scope for scope in known if scope.startswith(beginning)}
    if len(scopes) != 1:
        raise StoreError(f"{len(scopes) or 'no'} scopes begin with {beginning!r}")
    return scopes.pop()


def confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("nobody can be asked here; add --yes")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _table(known: Sequence[StoredCompaction], unreadable: int) -> Iterator[str]:
    if unreadable:
        yield f"{_unreadable(unreadable)}."
    if not known:
        yield from () if unreadable else ["No compactions yet."]
        return
    now_s = time.time()
    yield f"{'id':16}  {'scope':8}  {'made':>8}  {'used':>8}  {'round':>5}  {'covers':>6}  {'by':8}  {'bytes':>9}"
    for stored in known:
        compaction = stored.compaction
        yield (
            f"{stored.id:16}  {stored.scope[:8]:8}  {_age(now_s - stored.created_s):>8}  "
            f"{_age(now_s - stored.used_s):>8}  {compaction.round:5}  {compaction.covered_messages:6}  "
            f"{compaction.level:8}  {stored.size_bytes:9,}"
        )
    total_bytes = sum(stored.size_bytes for stored in known)
    yield f"{len(known)} compactions, {total_bytes:,} bytes, {len({stored.scope for stored in known})} scopes"


def _details(stored: StoredCompaction) -> Iterator[str]:
    compaction = stored.compaction
    yield f"id        {stored.id}"
    yield f"scope     {stored.scope}"
    yield f"made      {_time(stored.created_s)}, last used {_time(stored.used_s)}"
    yield f"round     {compaction.round}, {compaction.level}, window {compaction.window_tokens:,} tokens"
    yield f"covers    {compaction.covered_messages} messages, {compaction.summarized_messages} of them summarized"
    for segment in compaction.segments:
        yield f"\n--- summary of round {segment.round}, to message {segment.covered_messages}\n{segment.text}"
    shortened = sum(isinstance(how, int) for _, how in compaction.shown)
    if compaction.dropped or shortened:
        yield f"pruned    {len(compaction.dropped)} messages left out, {shortened} shortened"
    if compaction.omissions:
        yield f"\n--- said of what was left out\n{compaction.omissions}"
    if compaction.ledger:
        yield f"\n--- ledger\n{compaction.ledger}"


def _time(when_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when_s))


def _age(seconds: float) -> str:
    for unit, name in _AGES:
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def recall(
    store: Store, originals: Originals | None, *, query: str, scope: str | None, last: int, as_json: bool
) -> int:
    """Prints what is found for a query, the best first; ends the store and the originals; 0.

    Args:
        scope: the beginning of the only one that is searched; None for all.
        last: as many hits at most.

    Raises:
        StoreError: there are none, they cannot be read, or the scope is not clear.
        QueryTooLong: with what to change.
    """
    stretches = asyncio.run(_read(store, originals))
    if not stretches:
        raise StoreError(NONE_KEPT)
    only = whole_scope(scope, (stretch.scope for stretch in stretches))
    index = indexed(stretch for stretch in stretches if only in (None, stretch.scope))
    found = search(index, checked(query), limit=last)
    print(json.dumps(found_fields(found), ensure_ascii=False) if as_json else shown_to_people(found))
    return 0


async def _read(store: Store, originals: Originals | None) -> Sequence[Stretch]:
    try:
        return [] if originals is None else await originals.scan()
    finally:
        if originals is not None:
            await originals.aclose()
        await store.aclose()
