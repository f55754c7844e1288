"""A client's orders about the context of its conversation, and what its answer says of it, whatever the protocol."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError

from litellm_compaction.core.forms import ClearOrder
from litellm_compaction.core.messages import Message, Request
from litellm_compaction.core.portable import Portable, Unfolded, portable, unfolded
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.errors import BadItem

# Reads the text of a compaction that a client has kept, which stands at the named place.
Opened: TypeAlias = Callable[[object, str], Awaitable[Portable]]
_Shape = TypeVar("_Shape", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """A client's orders.

    Attributes:
        portable: stands for the conversation before it; None for none.
        placeholder: the text of the message that stands in its place.
        compacts_only: the client wants the compaction in place of an answer.
        counts_only: it wants the tokens of the prompt in place of an answer.
        wants_item: it takes the compaction back, if one is made.
        spares_requests: it sends its user's messages beside that.
        pauses: a compaction that is made is the answer, and the client asks again.
        clear: what to clear of old tool results; None for no order.
        tells_edits: the answer says what was cleared.
        threshold_tokens: the prompt above which it wants one, in tokens; 0 for the proxy's own trigger.
        may_change: False to be refused rather than compacted.
        focus: the topic that a summary is to keep in detail, "" for none. Untrusted data.
    """

    portable: Portable | None = None
    placeholder: str = ""
    compacts_only: bool = False
    counts_only: bool = False
    wants_item: bool = False
    spares_requests: bool = False
    pauses: bool = False
    clear: ClearOrder | None = None
    tells_edits: bool = False
    threshold_tokens: int = 0
    may_change: bool = True
    focus: str = ""

    @property
    def shows(self) -> bool:
        """The answer says something of the context."""
        return self.wants_item or self.compacts_only or self.counts_only or self.tells_edits

    def unfolded(self, messages: tuple[Message, ...]) -> Unfolded:
        """Returns a request's messages with all that the placeholder stands for."""
        return Unfolded(messages) if self.portable is None else unfolded(messages, self.portable, self.placeholder)

    def returned(self, request: Request, prepared: PreparedRequest | None) -> Portable | None:
        """Returns the compaction with which a request was sent, if it goes back to the client; else None.

        A client that wants the compaction alone gets all its messages where there is nothing to compact.
        """
        if not (self.wants_item or self.compacts_only) or prepared is None or prepared.way is not None:
            # Of an answer that was carried over the limit a part is covered: that record is for the next turn's store.
            return None
        if not self.compacts_only:
            known = "" if self.portable is None else self.portable.record
            if prepared.compaction is None or prepared.compaction.record == known != "":
                return None
        return portable(request.messages, prepared.compaction, spares_requests=self.spares_requests)


NO_ORDERS = Orders()


class Told(NamedTuple):
    """An answer's word about the context of its conversation.

    Attributes:
        text: of the portable compaction, "" for none.
        record: the same as a person may read it.
        cleared_calls, cleared_tokens: of old tool results, as ordered.
        read_tokens, written_tokens: of the compaction that was made for it; of a count the prompt's.
        is_alone: no model says anything.
    """

    text: str = ""
    record: str = ""
    cleared_calls: int = 0
    cleared_tokens: int = 0
    read_tokens: int = 0
    written_tokens: int = 0
    is_alone: bool = False


def checked(shape: type[_Shape], value: object, field: str, place: str) -> _Shape:
    """Returns a field of a request as its protocol has it.

    Args:
        place: how the protocol's errors write the place in a list, such as "[{}]".

    Raises:
        BadItem: it is not so. Values are not quoted.
    """
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        found: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
        names = (place.format(each) if isinstance(each, int) else f".{each}" for each in found["loc"])
        if found["type"] == "union_tag_invalid":
            raise BadItem(f"{field}{''.join(names)}.type", "is none of the known edits") from None
        raise BadItem(f"{field}{''.join(names)}", f"is not as the protocol has it ({found['msg']})") from None
