"""The person's messages that stay verbatim in every compaction of a conversation, since the client has pinned them.

The compactor asks for them before it plans. The store keeps them as entries of the hash chain under the conversation's
first message, without any text.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from litellm_compaction.core.view import View, is_persons
from litellm_compaction.engine.context import MeasuredRequest
from litellm_compaction.errors import BadWish
from litellm_compaction.stores import Store

# Of the window, for all pinned messages together.
PINNED_SHARE = 0.10
_STORE_TIMEOUT_S = 2.0
# Of all conversations with one first message.
_MOST_KEPT = 512


class Pins:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def applied(self, measured: MeasuredRequest) -> MeasuredRequest:
        """Returns a request whose conversation knows its pinned messages; `measured` has its hashes.

        The list of a request is the conversation's from then on; a request without one goes by the last list.

        Raises:
            BadWish: a pin of the request is in no message of the person's, or all of them are too large.
        """
        conversation, pins = measured.conversation, measured.context.pins
        entries = conversation.hashes[1:]
        if not entries or measured.context.is_client_summary:
            return measured
        limit_tokens = int(PINNED_SHARE * measured.window.tokens)
        scope, fact = measured.context.scope, f"pins:{entries[0]}"
        kept: list[str] = []
        # The store tells its own troubles; the request is too long either way.
        with contextlib.suppress(Exception):
            kept = (await asyncio.wait_for(self._store.get_fact(scope, fact), _STORE_TIMEOUT_S) or "").split()
        if pins is None:
            places = {entry: conversation.prefix + at for at, entry in enumerate(entries)}
            indices = _fitting(conversation, [places[entry] for entry in kept if entry in places], limit_tokens)
        else:
            indices = _wanted(conversation, pins, limit_tokens)
            # Those of conversations that only begin alike stay.
            others = [entry for entry in kept if entry not in entries]
            listed = [*others, *(entries[index - conversation.prefix] for index in indices)][-_MOST_KEPT:]
            if listed != kept:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(self._store.put_fact(scope, fact, " ".join(listed)), _STORE_TIMEOUT_S)
        if not indices:
            return measured
        conversation = replace(conversation, pins=indices)
        budget = replace(measured.budget, floor_tokens=conversation.floor_tokens)
        return replace(measured, conversation=conversation, budget=budget)


def _fitting(conversation: View, indices: Sequence[int], limit_tokens: int) -> tuple[int, ...]:
    """As many pinned messages as there is room for: a window may have shrunk."""
    fitting: list[int] = []
    for index in indices:
        if conversation.sizes[index] <= limit_tokens:
            limit_tokens -= conversation.sizes[index]
            fitting.append(index)
    return tuple(fitting)


def _wanted(conversation: View, pins: Sequence[str], limit_tokens: int) -> tuple[int, ...]:
    """The indices of the person's messages that pins name: of each the newest with these words."""
    messages = conversation.messages
    persons = [at for at in range(len(messages) - 1, conversation.prefix - 1, -1) if is_persons(messages[at])]
    indices = dict[int, None]()
    for number, pin in enumerate(pins, 1):
        words = " ".join(pin.split())
        index = next((at for at in persons if words in " ".join(messages[at].text.split())), None)
        if index is None:
            raise BadWish(f"Pin {number} is in no message of the user's: allowed are words of one.")
        indices[index] = None
    tokens = sum(conversation.sizes[index] for index in indices)
    if tokens > limit_tokens:
        raise BadWish(
            f"The pinned messages have {tokens} tokens; at most {limit_tokens} can stay pinned, a tenth of the "
            "window. Pin fewer or shorter messages."
        )
    return tuple(indices)
