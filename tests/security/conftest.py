"""The proxy that tenants share in these files: both carriers, and sixteen identities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.bench import AUTH, Bench, Group, open_bench
from tests.integration.conftest import _never_over_the_window
from tests.integration.harness import entry
from tests.integration.plain_server import PlainServer, serve_plain
from tests.security.office import GUARDED, LIED, honest

__all__ = ["_never_over_the_window"]

# Several at once, each with the whole window: one answers while another's summary is held, and none waits.
_APART: dict[str, Any] = {"slots": 16, "simulator": {"unified_kv": False, "chunk_tokens": 500}}
_FOREIGN = {**_APART, "simulator": {**_APART["simulator"], "api": "openai"}}


def _on(window: int) -> dict[str, Any]:
    return {"enabled": True, "context_length": window}


_GROUPS = [
    Group("local", **_APART),
    Group("hooked", provider="xinference", compaction=_on(8192), **_APART),
    Group("small", 4096, **_APART),
    Group("foreign", 4096, provider="openai", compaction=_on(4096), **_FOREIGN),
    Group("foreign-hooked", 4096, provider="xinference", compaction=_on(4096), **_FOREIGN),
]
assert {group.name for group in _GROUPS} >= set(GUARDED)


@pytest.fixture(scope="session")
def liar() -> Iterator[PlainServer]:
    """The server behind the groups of `LIED`."""
    with serve_plain() as made:
        made.says = honest
        yield made


@pytest.fixture(scope="session")
def office(tmp_path_factory: pytest.TempPathFactory, liar: PlainServer) -> Iterator[Bench]:
    """A proxy that people share who do not trust each other; `local` is carried by the transport, `hooked` by hooks."""
    folder = tmp_path_factory.mktemp("office")
    url = f"{liar.base_url}/v1"
    providers = {group: "xinference" if "hooked" in group else "openai" for group in LIED}
    lied = [entry(group, f"{providers[group]}/{group}", url, compaction=_on(LIED[group])) for group in LIED]
    with open_bench(
        folder,
        _GROUPS,
        {"window_cache_s": 0.2, "admission": "off"},
        entries=lied,
        general_settings=AUTH,
    ) as bench:
        yield bench
