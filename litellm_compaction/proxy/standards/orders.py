"""A client's orders about its conversation's context, the compactions that it keeps, and what its answer says of both.

A compaction that a client keeps is encrypted text, bound to the tenant: another one's is none.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from litellm_compaction.core.forms import ClearOrder
from litellm_compaction.core.messages import Message, Request, parse_message
from litellm_compaction.core.portable import Portable, Unfolded, portable, unfolded
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.errors import BadItem
from litellm_compaction.master_key import Box
from litellm_compaction.stores.store import decode, encode, encode_text

# The text of a conversation's record that keeps all of it; a person does not write this.
_WHOLE = "[The conversation so far, as the client has kept it]"
_MARK = "lmc1."
# A window of a million tokens has about 4 MB of text; images are larger.
_MOST_CHARS, _MOST_BYTES = 64_000_000, 256_000_000


@dataclass(frozen=True, kw_only=True)
class Orders:
    """A client's orders; as many fields as the two protocols have words."""

    portable: Portable | None = None  # Stands for the conversation before it.
    compacts_only: bool = False  # It wants the compaction in place of an answer.
    counts_only: bool = False  # It wants the tokens of the prompt in place of an answer.
    wants_item: bool = False  # It takes the compaction back, if one is made.
    spares_requests: bool = False  # It sends its user's messages beside that.
    pauses: bool = False  # A compaction that is made is the answer, and the client asks again.
    clear: ClearOrder | None = None  # Of old tool results.
    tells_edits: bool = False  # The answer says what was cleared.
    threshold_tokens: int = 0  # The prompt above which it wants one; 0 for the proxy's own trigger.
    may_change: bool = True  # False to be refused rather than compacted.
    focus: str = ""  # The topic that a summary is to keep in detail. Untrusted data.

    @cached_property
    def shows(self) -> bool:
        """The answer says something of the context."""
        return self.wants_item or self.compacts_only or self.counts_only or self.tells_edits

    def unfolded(self, messages: tuple[Message, ...]) -> Unfolded:
        """Returns a request's messages with all that the one with the record stands for."""
        kept = self.portable
        return (messages, ()) if kept is None else unfolded(messages, kept, record_of(kept))

    def returned(self, request: Request, prepared: PreparedRequest | None) -> Portable | None:
        """Returns the compaction with which a request was sent, if it goes back to the client; else None."""
        # Of an answer that was carried over the limit a part is covered: that record is for the next turn's store, like
        # one that tells of what the client leaves out.
        if not (self.wants_item or self.compacts_only) or prepared is None or prepared.continuation.way is not None:
            return None
        if prepared.measured.request.left_out:
            return None
        made, kept = prepared.compaction, "" if self.portable is None else self.portable.record
        # A client that wants the compaction alone gets all its messages where there is nothing to compact.
        is_news = self.compacts_only or (made is not None and (not kept or made.record != kept))
        return portable(request.messages, made, spares_requests=self.spares_requests) if is_news else None


def record_of(kept: Portable) -> str:
    """Returns what a person may read of a compaction, which is the message that stands in the conversation's place."""
    return kept.record or _WHOLE


class Told(NamedTuple):
    """An answer's word about the context of its conversation."""

    text: str = ""  # Of the portable compaction, "" for none.
    record: str = ""  # The same as `record_of` has it.
    cleared_calls: int = 0  # Of old tool results, as ordered.
    cleared_tokens: int = 0
    read_tokens: int = 0  # Of the compaction that was made for it; of a count the prompt's.
    written_tokens: int = 0
    is_alone: bool = False  # No model says anything.


class Items:
    """Portable compactions as text, encrypted with the proxy's master key; in clear where `secret` gives None.

    Of a long conversation both ways take a thread.
    """

    def __init__(self, secret: Callable[[], str | None]) -> None:
        self._box = Box(secret, b"portable compactions")

    def sealed(self, tenant: str, item: Portable) -> str:
        """Returns the text of a portable compaction."""
        fields = {
            "base": None if item.base is None else encode(item.base).decode("utf-8", "surrogatepass"),
            "kept": [dict(each.raw) for each in item.kept],
            "spares_requests": item.spares_requests,
        }
        body = zlib.compress(encode_text(json.dumps(fields, ensure_ascii=False, separators=(",", ":"))))
        data = self._box.locked(body, tenant, _MARK) if self._box.has_key else body
        return _MARK + base64.urlsafe_b64encode(data).decode()

    def opened(self, tenant: str, text: object, field: str) -> Portable:
        """Returns what `sealed` wrote; a BadItem at `field` is none, was changed, another's, or is too large."""
        if not isinstance(text, str) or not text.startswith(_MARK) or len(text) > _MOST_CHARS:
            raise BadItem(field, "was not made by this proxy")
        try:
            data = base64.b64decode(text.removeprefix(_MARK), altchars=b"-_", validate=True)
            if (body := self._box.opened(data, tenant, _MARK) if self._box.has_key else data) is None:
                raise BadItem(field, "was changed, or made for another key, team or proxy")
            # Where the proxy has no key anybody may write a bomb: what is too much is cut off.
            fields = json.loads(zlib.decompressobj().decompress(body, _MOST_BYTES).decode("utf-8", "surrogatepass"))
            base = None if fields["base"] is None else decode(encode_text(fields["base"]))
            beside = tuple(parse_message(each) for each in fields["kept"])
        except (zlib.error, ValueError, KeyError, TypeError, RecursionError):
            raise BadItem(field, "cannot be read: it was changed or cut off") from None
        if base is None and fields["base"] is not None:
            raise BadItem(field, "was made by another version of the plug-in")
        return Portable(base=base, kept=beside, spares_requests=bool(fields["spares_requests"]))
