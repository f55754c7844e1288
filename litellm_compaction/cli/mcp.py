"""`litellm-compaction mcp`: an operator's MCP client looks up what compactions covered, over stdin and stdout."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from litellm_compaction.cli.stores import NONE_KEPT, whole_scope
from litellm_compaction.errors import CompactionError, StoreError
from litellm_compaction.recall import KeptStretch, Lookup
from litellm_compaction.stores import Originals, Store


def mcp(store: Store, originals: Originals | None, *, scope: str | None) -> int:
    """Serves until the client closes stdin; ends the store and the originals; 0.

    Args:
        scope: the beginning of the only one that is shown; None for all.

    Raises:
        StoreError: there are no originals, they cannot be read, the scope is not clear, or the SDK is missing.
    """
    asyncio.run(_serve(store, originals, scope))
    return 0


async def _serve(store: Store, originals: Originals | None, beginning: str | None) -> None:
    try:
        if originals is None:
            raise StoreError(NONE_KEPT)
        scope = whole_scope(beginning, await originals.scopes())
        try:
            # Here: LiteLLM before 1.103 brings version 1 of the SDK.
            from mcp.server.stdio import stdio_server

            from litellm_compaction.proxy.mcp_server import RecallScope, recall_server
        except ImportError as error:
            raise StoreError("MCP needs LiteLLM 1.103 or newer, which brings version 2 of the mcp package") from error
        # At other levels it quotes what it reads.
        logging.getLogger("mcp").setLevel(logging.CRITICAL)
        shown = RecallScope(
            lookup=Lookup(_Everything(originals, scope)), store=store, tenant="", shows=lambda event: scope is None
        )
        server = recall_server(shown, _failed)
        async with stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())
    finally:
        if originals is not None:
            await originals.aclose()
        await store.aclose()


def _failed(error: Exception) -> str:
    return str(error) if isinstance(error, CompactionError) else f"this has failed: {type(error).__name__}"


class _Everything:
    """The originals of all tenants, or of one scope, as those of one owner."""

    def __init__(self, originals: Originals, scope: str | None) -> None:
        self._originals = originals
        self._scope = scope
        self._kept: dict[tuple[str, str], KeptStretch] = {}

    async def names(self, tenant: str) -> Sequence[tuple[str, str]]:
        found = await self._originals.scan()
        self._kept = {stretch.name: stretch for stretch in found if self._scope in (None, stretch.scope)}
        return list(self._kept)

    async def read(self, tenant: str, names: Sequence[tuple[str, str]]) -> Sequence[KeptStretch]:
        return [self._kept[name] for name in names if name in self._kept]
