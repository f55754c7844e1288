"""`/compaction/mcp`: a key's MCP client looks up what the key's own conversations lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from fastapi import Request
from starlette.types import Receive, Scope, Send

from litellm_compaction.proxy.page.auth import Visitor
from litellm_compaction.proxy.page.recall import error_answer, without_key
from litellm_compaction.proxy.refusals import log_failure
from litellm_compaction.recall import Lookup
from litellm_compaction.stores import Store

MCP_PATH = "/compaction/mcp"
_MOST_BODY_BYTES = 1_000_000


class McpRoute:
    """Streamable HTTP without sessions: each request shows its key, and any worker answers it.

    Args:
        visitor: gives the owner of a request's key, None if it has none that the proxy knows.
    """

    def __init__(self, lookup: Lookup, store: Store, visitor: Callable[[Request], Awaitable[Visitor | None]]) -> None:
        self._lookup = lookup
        self._store = store
        self._visitor = visitor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        visitor = await self._visitor(request)
        if visitor is None:
            await without_key()(scope, receive, send)
        elif request.method != "POST":
            # There is no session to end, and nothing is sent unasked.
            await error_answer(HTTPStatus.METHOD_NOT_ALLOWED, "only POST is answered")(scope, receive, send)
        else:
            await self._answer(visitor.tenant, scope, receive, send)

    async def _answer(self, tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # Here: LiteLLM before 1.103 brings version 1 of the SDK.
            from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

            from litellm_compaction.proxy.mcp_server import RecallScope, recall_server
        except ImportError:
            refused = error_answer(HTTPStatus.NOT_IMPLEMENTED, "MCP needs LiteLLM 1.103 or newer on this proxy")
            await refused(scope, receive, send)
            return
        shown = RecallScope(
            lookup=self._lookup,
            store=self._store,
            tenant=tenant,
            shows=lambda event: event.tenant == tenant,
            events_with=tenant,
        )
        manager = StreamableHTTPSessionManager(
            recall_server(shown, _failed), json_response=True, stateless=True, max_request_body_size=_MOST_BODY_BYTES
        )
        # One for each request: so nothing is left to end with the proxy, and no server knows two tenants.
        async with manager.run():
            await manager.handle_request(scope, receive, send)


def _failed(error: Exception) -> str:
    log_failure("mcp", error)
    return "this has failed; the proxy's log says where"
