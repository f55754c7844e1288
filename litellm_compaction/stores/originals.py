"""Keeps the messages that compactions cover, encrypted, so that they can be looked up.

A row is a stretch of a conversation that was covered at once, under the hash chain's entry after it: a later compaction
adds what it covers beyond, and conversations that begin alike share the beginning. A list of each tenant's leads there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from litellm_compaction.concurrency import Tasks
from litellm_compaction.core.messages import JsonObject, JsonValue, Message, parse_message
from litellm_compaction.core.secrets import Redact
from litellm_compaction.core.stretches import texts_of
from litellm_compaction.errors import CompactionError
from litellm_compaction.master_key import Box
from litellm_compaction.recall.lookup import Name, Stretch
from litellm_compaction.stores.rows import Row, Rows
from litellm_compaction.stores.store import encode_text

logger = logging.getLogger("litellm_compaction")
_ROW, _STRETCHES = "o:", "stretches"
# A fork stores again what lies between its last common entry and the fork.
_MOST_MESSAGES, _MOST_CHARS = 64, 500_000
# The oldest are not found any more. Of scopes there is one for each model and way to compact that a tenant has used;
# each is asked for by itself.
_MOST_LISTED, _MOST_SCOPES = 4096, 256
# Back from an entry of a chain: up to 4,096 messages.
_MOST_FOLLOWED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """Messages that a compaction covers, of a request's scope and tenant."""

    scope: str
    tenant: str
    messages: Sequence[Message]  # n, oldest first, without the leading system messages.
    hashes: Sequence[str]  # n + 1, their hash chain.
    redact: Redact = str  # Takes out what is not written down.


class Originals:
    """Originals in rows of their own, which are forgotten after their time to live, found or not.

    `secret` gives the proxy's master key, from which the rows' key is derived; without one nothing is kept.
    """

    def __init__(self, rows: Rows, *, secret: Callable[[], str | None]) -> None:
        self._rows, self._box = rows, Box(secret, b"originals")
        self._tasks = Tasks()
        self._warned: set[str] = set()

    @property
    def are_kept(self) -> bool:
        """Returns True if there is a master key to encrypt them with."""
        return self._box.has_key

    def keep(self, covered: Covered) -> None:
        """Begins to keep what is not kept yet; nothing waits for it, and a failure is logged once."""
        self._tasks.begin(self._try_to_keep(covered))

    async def aclose(self) -> None:
        """Returns when all that was begun is kept, or given up; any number of times."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def names(self, tenant: str) -> list[Name]:
        """Returns the names of a tenant's stretches, as far as they are listed, oldest first.

        Of more than 4,096, or in more than 256 scopes, the last, whatever somebody has written into a shared store.
        """
        rows = await self._rows.find(tenant, [_STRETCHES])
        listed = [entry.rpartition(":") for row in rows for entry in _entries(row.body)]
        scopes = set(list(dict.fromkeys(scope for scope, _, _ in reversed(listed)))[:_MOST_SCOPES])
        return [(scope, key) for scope, _, key in listed if scope in scopes]

    async def read(self, tenant: str, names: Sequence[Name]) -> list[Stretch]:
        """Returns those stretches of a tenant that are still there and can be read."""
        rows: list[Row] = []
        for scope in dict.fromkeys(scope for scope, _ in names):
            rows += await self._rows.find(scope, [_ROW + key for owner, key in names if owner == scope])
        return [stretch for stretch in await asyncio.to_thread(self._opened, rows) if stretch.tenant == tenant]

    async def covered(self, scope: str, entry: str, *, tenant: str | None = None) -> list[Message]:
        """Returns the messages before an entry of a hash chain, oldest first; the last of them if not all are kept.

        `tenant` says whose they are, None for any, for an operator.
        """
        messages: list[Message] = []
        for _ in range(_MOST_FOLLOWED):
            stretches = await asyncio.to_thread(self._opened, await self._rows.find(scope, [_ROW + entry]))
            if not stretches or tenant not in (None, stretches[0].tenant):
                break
            messages[:0] = stretches[0].messages
            entry = stretches[0].hashes[0]
        return messages

    async def scan(self) -> list[Stretch]:
        """Returns all that can be read, of all tenants, oldest first: for an operator."""
        stretches = await asyncio.to_thread(self._opened, await self._listed())
        return sorted(stretches, key=lambda stretch: stretch.kept_s)

    async def scopes(self) -> set[str]:
        """Returns the scopes of which something is kept, readable or not."""
        return {row.scope for row in await self._listed()}

    async def delete(self, *, scope: str | None = None, unused_since_s: float | None = None) -> int:
        """Forgets originals, as `Store.delete` forgets compactions; returns the number of stretches."""
        deleted = await self._rows.delete(scope=scope, before_s=unused_since_s)
        return sum(key.startswith(_ROW) for key in deleted)

    async def _listed(self) -> list[Row]:
        return [row for row in await self._rows.scan() if row.key.startswith(_ROW)]

    async def _try_to_keep(self, covered: Covered) -> None:
        try:
            await self._keep(_without_synthetic(covered))
        except Exception as error:  # noqa: BLE001 - the request has its compaction, with or without originals (P8)
            said = str(error) if isinstance(error, CompactionError) else type(error).__name__
            self._warn_once("originals_failed %s; (logged once)", said)

    async def _keep(self, covered: Covered) -> None:
        if not self.are_kept:
            text = "originals_off %s needs a master key, with which it encrypts them; none are kept"
            self._warn_once(text, "keep_originals")
            return
        listed = set(await self.names(covered.tenant))
        start = max((at for at, entry in enumerate(covered.hashes) if (covered.scope, entry) in listed), default=0)
        for first, end in _stretches(covered.messages, start):
            body = await asyncio.to_thread(self._sealed, covered, first, end)
            # The row first: what is listed is whole.
            await self._rows.put(covered.scope, _ROW + covered.hashes[end], body)
            add = partial(_added, f"{covered.scope}:{covered.hashes[end]}")
            await self._rows.change(covered.tenant, _STRETCHES, add)

    def _sealed(self, covered: Covered, first: int, end: int) -> bytes:
        messages = [_as_json(message, covered.redact) for message in covered.messages[first:end]]
        fields = {"tenant": covered.tenant, "hashes": covered.hashes[first : end + 1], "messages": messages}
        text = encode_text(json.dumps(fields, ensure_ascii=False, separators=(",", ":")))
        return self._box.locked(zlib.compress(text), covered.scope, _ROW + covered.hashes[end])

    def _opened(self, rows: Sequence[Row]) -> list[Stretch]:
        """Those rows that can be decrypted."""
        stretches = [stretch for row in rows if (stretch := self._stretch(row)) is not None]
        if len(stretches) < len(rows):
            text = "originals_unreadable rows=%d were written with another master key, or changed; they are passed over"
            self._warn_once(text, len(rows) - len(stretches))
        return stretches

    def _stretch(self, row: Row) -> Stretch | None:
        body = self._box.opened(row.body, row.scope, row.key)
        if body is None:
            return None
        try:
            fields = json.loads(zlib.decompress(body).decode("utf-8", "surrogatepass"))
            messages = tuple(map(parse_message, fields["messages"]))
        except (zlib.error, ValueError, KeyError, TypeError):
            return None
        hashes, tenant = tuple(fields["hashes"]), fields["tenant"]
        return Stretch(scope=row.scope, tenant=tenant, messages=messages, hashes=hashes, kept_s=row.created_s)

    def _warn_once(self, text: str, value: object) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text, value)


def _entries(body: bytes) -> list[str]:
    """A list, of which the last count; any process may have written it."""
    return body.decode(errors="replace").rsplit(maxsplit=_MOST_LISTED)[-_MOST_LISTED:]


def _added(entry: str, kept: bytes | None, _: float) -> bytes:
    return " ".join(list(dict.fromkeys((*_entries(kept or b""), entry)))[-_MOST_LISTED:]).encode()


def _without_synthetic(covered: Covered) -> Covered:
    """Messages up to where an answer goes on: the next turn says that answer in one piece."""
    end = next((at for at, message in enumerate(covered.messages) if message.is_synthetic), len(covered.messages))
    while end < len(covered.messages) and end and covered.messages[end - 1].role == "assistant":
        end -= 1
    return replace(covered, messages=covered.messages[:end], hashes=covered.hashes[: end + 1])


def _stretches(messages: Sequence[Message], start: int) -> Iterator[tuple[int, int]]:
    """The ranges in which messages from `start` on are kept."""
    first, chars = start, 0
    for at in range(start, len(messages)):
        size = len(messages[at].text) + sum(len(call.arguments) for call in messages[at].calls)
        if at > first and (at - first == _MOST_MESSAGES or chars + size > _MOST_CHARS):
            yield first, at
            first, chars = at, 0
        chars += size
    if first < len(messages):
        yield first, len(messages)


def _as_json(message: Message, redact: Redact) -> JsonObject:
    """A message's words and calls, without secrets and without anything that is no text."""
    parts: list[JsonValue] = [{"type": "text", "text": redact(text)} for text in texts_of(message)]
    has_parts = isinstance(message.raw.get("content"), list)
    fields: dict[str, JsonValue] = {"role": message.role, "content": parts if has_parts else redact(message.text)}
    if message.calls:
        fields["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": redact(call.arguments)}}
            for call in message.calls
        ]
    if message.call_id:
        fields["tool_call_id"] = message.call_id
    return fields
