"""A client's orders about the context of its conversation, whatever its protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from litellm_compaction.core.clear_order import ClearOrder
from litellm_compaction.core.messages import Message, Request
from litellm_compaction.core.portable import Portable, Unfolded, portable, unfolded
from litellm_compaction.engine import PreparedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """A client's orders.

    Attributes:
        portable: stands for the conversation before it; None for none.
        placeholder: the text of the message that stands in its place.
        compacts_only: the client wants the compaction in place of an answer.
        count: is told the tokens of the prompt, which the client wants in place of an answer; None if it wants one.
        wants_item: it takes the compaction back, if one is made.
        spares_requests: it sends its user's messages beside that.
        pauses: a compaction that is made is the answer, and the client asks again.
        clear: what to clear of old tool results; None for no order.
        cleared_thoughts: the turns whose thoughts went by its order.
        tells_edits: the answer says what was cleared.
        threshold_tokens: the prompt above which it wants one, in tokens; 0 for the proxy's own trigger.
        may_change: False to be refused rather than compacted.
        focus: the topic that a summary is to keep in detail, "" for none. Untrusted data.
    """

    portable: Portable | None = None
    placeholder: str = ""
    compacts_only: bool = False
    count: Callable[[int], None] | None = None
    wants_item: bool = False
    spares_requests: bool = False
    pauses: bool = False
    clear: ClearOrder | None = None
    cleared_thoughts: int = 0
    tells_edits: bool = False
    threshold_tokens: int = 0
    may_change: bool = True
    focus: str = ""

    @property
    def shows(self) -> bool:
        """The answer says something of the compaction."""
        return self.wants_item or self.compacts_only or self.tells_edits

    def unfolded(self, messages: tuple[Message, ...]) -> Unfolded:
        """Returns a request's messages with all that the placeholder stands for."""
        return Unfolded(messages) if self.portable is None else unfolded(messages, self.portable, self.placeholder)


NO_ORDERS = Orders()


def returned(orders: Orders, request: Request, prepared: PreparedRequest | None) -> Portable | None:
    """Returns the compaction with which a request was sent, if it goes back to the client; else None.

    A client that wants the compaction alone gets all its messages where there is nothing to compact.
    """
    if not (orders.wants_item or orders.compacts_only) or prepared is None or prepared.way is not None:
        # Of an answer that was carried over the limit a part is covered: that record is the store's, for the next turn.
        return None
    if not orders.compacts_only:
        known = "" if orders.portable is None else orders.portable.record
        if prepared.compaction is None or prepared.compaction.record == known != "":
            return None
    return portable(request.messages, prepared.compaction, spares_requests=orders.spares_requests)
