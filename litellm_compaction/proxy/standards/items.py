"""Portable compactions as signed text, so that a client can keep them and change nothing.

Bound to the tenant: another one's is none. The text is the client's own conversation, compressed and not encrypted.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import zlib
from collections.abc import Callable

from litellm_compaction.concurrency import off_loop_if
from litellm_compaction.core.messages import parse_message
from litellm_compaction.core.portable import Portable
from litellm_compaction.errors import BadItem
from litellm_compaction.master_key import Box
from litellm_compaction.stores.store import decode, encode, encode_text

_MARK = "lmc1."
_MAC_BYTES = 16
# A window of a million tokens has about 4 MB of text; images are larger.
_MOST_CHARS, _MOST_BYTES = 64_000_000, 256_000_000
_LONG_CHARS = 100_000


class Items:
    """Writes and reads them.

    Args:
        secret: gives the proxy's master key; None if the proxy asks for none, and then nothing is signed.
    """

    def __init__(self, secret: Callable[[], str | None]) -> None:
        self._seal = Box(secret, b"portable compactions")

    async def sealed(self, tenant: str, found: Portable) -> str:
        """Returns the text of a portable compaction; the same one for the same."""
        is_long = sum(len(each.text) + 1000 * len(each.other_parts) for each in found.kept) > _LONG_CHARS
        return await off_loop_if(is_long, lambda: self._sealed(tenant, found))

    async def opened(self, tenant: str, text: object, field: str) -> Portable:
        """Returns what `sealed` wrote.

        Args:
            field: the place in the client's request, for the error.

        Raises:
            BadItem: it is none, was changed, is another tenant's or proxy's, or too large.
        """
        if not isinstance(text, str) or not text.startswith(_MARK):
            raise BadItem(field, "was not made by this proxy")
        return await off_loop_if(len(text) > _LONG_CHARS, lambda: self._opened(tenant, text, field))

    def _sealed(self, tenant: str, found: Portable) -> str:
        fields = {
            "base": None if found.base is None else encode(found.base).decode("utf-8", "surrogatepass"),
            "kept": [dict(each.raw) for each in found.kept],
            "spares_requests": found.spares_requests,
        }
        body = zlib.compress(encode_text(json.dumps(fields, ensure_ascii=False, separators=(",", ":"))))
        return _MARK + base64.urlsafe_b64encode(self._mac(tenant, body) + body).decode()

    def _opened(self, tenant: str, text: str, field: str) -> Portable:
        if len(text) > _MOST_CHARS:
            raise BadItem(field, f"has more than {_MOST_CHARS // 1_000_000} million characters")
        try:
            data = base64.b64decode(text.removeprefix(_MARK), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise BadItem(field, "was changed or cut off") from None
        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(tenant, body)):
            raise BadItem(field, "was changed, or made for another key, team or proxy")
        try:
            unpacked = zlib.decompressobj()
            read = unpacked.decompress(body, _MOST_BYTES)
            if unpacked.unconsumed_tail:
                raise BadItem(field, f"holds more than {_MOST_BYTES // 1_000_000} MB")
            fields = json.loads(read.decode("utf-8", "surrogatepass"))
            base = None if fields["base"] is None else decode(encode_text(fields["base"]))
            if base is None and fields["base"] is not None:
                raise BadItem(field, "was made by another version of the plug-in")
            kept = tuple(parse_message(each) for each in fields["kept"])
            return Portable(base=base, kept=kept, spares_requests=bool(fields["spares_requests"]))
        except (zlib.error, ValueError, KeyError, TypeError, RecursionError):
            # Only without a master key, or by another version.
            raise BadItem(field, "cannot be read") from None

    def _mac(self, tenant: str, body: bytes) -> bytes:
        return self._seal.mac(tenant.encode(), body) or bytes(_MAC_BYTES)
