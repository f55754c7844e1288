"""What the page is made of: whose events, which states, which models to be warned of."""

from __future__ import annotations

import time
from typing import Any

import pytest

from litellm_compaction.errors import WindowUnknown
from litellm_compaction.events import CompactionEvent, event_to_json
from litellm_compaction.proxy.page.auth import Visitor
from litellm_compaction.proxy.page.data import _state, events_for
from litellm_compaction.proxy.report import DeploymentReport
from litellm_compaction.windows.windows import Target
from tests.stores.made import MemoryStore


@pytest.mark.slow
async def test_a_tenant_s_events_are_found_behind_thousands_of_others() -> None:
    """However many others have written since; only its own, the newest first, as many as are shown."""
    store = MemoryStore(ttl_s=100, max_bytes=1_000_000)
    known: dict[str, Any] = {"phase": "pre_request", "model": "m", "window_tokens": 8192, "window_source": "operator"}
    for number in range(6000):
        tenant = "anna" if number < 300 else "bert"
        event = CompactionEvent(outcome="compacted", tokens_before=number, tokens_after=1, tenant=tenant, **known)
        await store.add_event(time.time(), event_to_json(event))
    found = await events_for(store, Visitor(role="internal_user", tenant="anna", auth=None))
    assert [event.tokens_before for event in found if isinstance(event, CompactionEvent)] == [*range(299, 99, -1)]
    assert await events_for(store, Visitor(role="", tenant="an", auth=None)) == []
    everything = await events_for(store, Visitor(role="proxy_admin", tenant="carl", auth=None))
    assert [event.tenant for event in everything] == ["bert"] * 200


_TARGET = Target(key="1|m", model="m", api_base="http://10.0.0.7/v1", api_key=None, context_length=None)


def test_why_nobody_knows_a_window_is_not_everybodys_business() -> None:
    """The error names the server; only who sees all is told."""
    report = DeploymentReport(target=_TARGET, carrier="hooks", absence=WindowUnknown("m", tried="10.0.0.7 says no"))
    assert "10.0.0.7" in _state(report, Visitor(role="proxy_admin", tenant="t", auth=None))
    assert _state(report, Visitor(role="internal_user", tenant="t", auth=None)) == "not known"
