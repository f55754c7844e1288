"""A compaction as bytes that survive upgrades, and back. Called by the stores that outlive a process.

Written field by field as the dataclasses say, so a new field needs no change here: where it is missing it takes its
default, and one that is not known is passed over.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from litellm_compaction.core.compaction import Compaction


@dataclass(frozen=True, slots=True, kw_only=True)
class _Envelope:
    version: Literal[1]
    compaction: Compaction


_ADAPTER = TypeAdapter(_Envelope)


def encode(compaction: Compaction) -> bytes:
    """JSON in UTF-8, which holds half surrogate pairs too: clients do send them."""
    fields = _ADAPTER.dump_python(_Envelope(version=1, compaction=compaction), mode="json", warnings=False)
    return encode_text(json.dumps(fields, ensure_ascii=False, separators=(",", ":")))


def decode(data: bytes) -> Compaction | None:
    """The compaction that `encode` wrote, in whatever version; None where it cannot be read."""
    try:
        return _ADAPTER.validate_python(_as_now(json.loads(decode_text(data)))).compaction
    except (ValidationError, ValueError, RecursionError):
        return None


def encode_text(text: str) -> bytes:
    """Any string of Python's."""
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: bytes) -> str:
    """The string that `encode_text` wrote.

    Raises:
        ValueError: it did not write this.
    """
    return data.decode("utf-8", "surrogatepass")


def _as_now(fields: object) -> object:
    """What was written before several messages could be pinned: one position, or null."""
    compaction = fields.get("compaction") if isinstance(fields, dict) else None
    if isinstance(compaction, dict) and not isinstance(pinned := compaction.get("pinned"), list):
        compaction["pinned"] = [] if pinned is None else [pinned]
    return fields
