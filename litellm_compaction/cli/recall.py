"""`litellm-compaction recall`: an operator searches the originals of all tenants, or of one scope."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from litellm_compaction.cli.stores import whole_scope
from litellm_compaction.errors import StoreError
from litellm_compaction.recall import found_fields, indexed, search, shown_to_people
from litellm_compaction.stores import Originals, Store, Stretch


def recall(
    store: Store, originals: Originals | None, *, query: str, scope: str | None, last: int, as_json: bool
) -> int:
    """Prints what is found for a query, the best first; ends the store and the originals; 0.

    Args:
        scope: the beginning of the only one that is searched; None for all.
        last: as many hits at most.

    Raises:
        StoreError: there are none, they cannot be read, or the scope is not clear.
    """
    stretches = asyncio.run(_read(store, originals))
    if not stretches:
        raise StoreError("there are no originals here that can be read; `keep_originals: compacted` keeps them")
    only = whole_scope(scope, (stretch.scope for stretch in stretches))
    index = indexed(stretch for stretch in stretches if only in (None, stretch.scope))
    found = search(index, query, limit=last)
    print(json.dumps(found_fields(found), ensure_ascii=False) if as_json else shown_to_people(found))
    return 0


async def _read(store: Store, originals: Originals | None) -> Sequence[Stretch]:
    try:
        return [] if originals is None else await originals.scan()
    finally:
        if originals is not None:
            await originals.aclose()
        await store.aclose()
