"""Where compactions are kept between requests: one function that opens a store by its URL."""

from __future__ import annotations

from litellm_compaction.errors import StoreError
from litellm_compaction.stores.memory import MemoryStore

__all__ = ["MemoryStore", "open_store"]


def open_store(url: str, *, ttl_s: float, max_bytes: int) -> MemoryStore:
    """The store that `url` names.

    Raises:
        StoreError: the scheme is not known.
    """
    if not url.startswith("memory://"):
        raise StoreError(f"store {url!r}: only memory:// is built in this version")
    return MemoryStore(ttl_s=ttl_s, max_bytes=max_bytes)
