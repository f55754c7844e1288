"""The person's messages that stay verbatim in every compaction of a conversation, since the client has pinned them.

The compactor asks for them before it plans. The store keeps them as entries of the hash chain under the conversation's
first message, without any text.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace

from litellm_compaction.core.view import View, is_persons
from litellm_compaction.engine.context import MeasuredRequest
from litellm_compaction.errors import BadWish
from litellm_compaction.stores import Store

# Of the window, for all pinned messages together.
PINNED_SHARE = 0.10
_FACT = "pins:"
_STORE_TIMEOUT_S = 2.0
# Of all conversations with one first message.
_MOST_KEPT = 512
# As recall shows them: the beginning of a message's entry in the hash chain.
_HANDLE = re.compile(r"[0-9a-f]{12}")


async def kept_pins(store: Store, scope: str, first_entry: str) -> Sequence[str]:
    """Returns the entries of messages that are pinned in conversations with one first message."""
    return (await store.get_fact(scope, _FACT + first_entry) or "").split()


class Pins:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def applied(self, measured: MeasuredRequest) -> MeasuredRequest:
        """Returns a request whose conversation knows its pinned messages; `measured` has its hashes.

        The list of a request is the conversation's from then on; a request without one goes by the last list.

        Raises:
            BadWish: a pin of the request is in no message of the person's, or all of them are too large.
        """
        conversation, wanted = measured.conversation, measured.context.pins
        if len(conversation.hashes) < 2 or measured.context.is_client_summary:
            return measured
        limit_tokens = int(PINNED_SHARE * measured.window.tokens)
        known = await self._known(measured)
        if wanted is None:
            indices = _fitting(conversation, known, limit_tokens)
        else:
            indices = _wanted(conversation, wanted, limit_tokens)
            await self._keep(measured, known, [_entry(conversation, index) for index in indices])
        if not indices:
            return measured
        conversation = replace(conversation, pins=indices)
        budget = replace(measured.budget, floor_tokens=conversation.floor_tokens)
        return replace(measured, conversation=conversation, budget=budget)

    async def _known(self, measured: MeasuredRequest) -> Sequence[str]:
        try:
            asked = kept_pins(self._store, measured.context.scope, measured.conversation.hashes[1])
            return await asyncio.wait_for(asked, _STORE_TIMEOUT_S)
        except Exception:  # noqa: BLE001 - the store tells its own troubles; the request is too long either way
            return ()

    async def _keep(self, measured: MeasuredRequest, known: Sequence[str], wanted: Sequence[str]) -> None:
        """Keeps a list, of too many pins the last; those of conversations that only begin alike stay."""
        hashes = measured.conversation.hashes
        entries = [*(entry for entry in known if entry not in hashes), *wanted]
        if entries != list(known):
            fact = " ".join(entries[-_MOST_KEPT:])
            written = self._store.put_fact(measured.context.scope, _FACT + hashes[1], fact)
            with contextlib.suppress(Exception):
                await asyncio.wait_for(written, _STORE_TIMEOUT_S)


def _entry(conversation: View, index: int) -> str:
    return conversation.hashes[index - conversation.prefix + 1]


def _fitting(conversation: View, entries: Sequence[str], limit_tokens: int) -> tuple[int, ...]:
    """The indices of pinned messages that are still there, as many as there is room for: a window may have shrunk."""
    places = {entry: conversation.prefix + at for at, entry in enumerate(conversation.hashes[1:])}
    indices: list[int] = []
    for index in (places[entry] for entry in entries if entry in places):
        if conversation.sizes[index] <= limit_tokens:
            limit_tokens -= conversation.sizes[index]
            indices.append(index)
    return tuple(indices)


def _wanted(conversation: View, pins: Sequence[str], limit_tokens: int) -> tuple[int, ...]:
    """The indices of the person's messages that pins name: each by its handle, or the newest with these words."""
    messages, found = conversation.messages, dict[int, None]()
    persons = [at for at in range(len(messages) - 1, conversation.prefix - 1, -1) if is_persons(messages[at])]
    for number, pin in enumerate(pins, 1):
        words = " ".join(pin.split())
        if _HANDLE.fullmatch(words):
            named = (at for at in persons if _entry(conversation, at).startswith(words))
        else:
            named = (at for at in persons if words in " ".join(messages[at].text.split()))
        index = next(named, None)
        if index is None:
            raise BadWish(f"Pin {number} is in no message of the user's: allowed are words of one, or its handle.")
        found[index] = None
    tokens = sum(conversation.sizes[index] for index in found)
    if tokens > limit_tokens:
        raise BadWish(
            f"The pinned messages have {tokens} tokens; at most {limit_tokens} can stay pinned, a tenth of the "
            "window. Pin fewer or shorter messages."
        )
    return tuple(found)
