"""The proxy that tenants share in these files: both carriers, and sixteen identities."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.bench import KEY, OPEN, Bench, Group, open_bench

BESIDE = Path(__file__).parent / "beside"
_ON = {"enabled": True, "context_length": 8192}
# Several at once, each with the whole window.
_APART = {"unified_kv": False, "chunk_tokens": 500}
_GROUPS = [
    Group("local", simulator=_APART),
    Group("hooked", provider="xinference", compaction=_ON, simulator=_APART),
    Group("small", 4096),
]


@pytest.fixture(autouse=True)
def _never_over_the_window() -> Iterator[None]:
    """P1 here, too: whoever asks for whatever, no guarded request went over its window or without a bound."""
    yield
    assert [finding for bench in OPEN for finding in bench.findings()] == []


@pytest.fixture(scope="session")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A proxy that people share who do not trust each other; `local` is carried by the transport, `hooked` by hooks."""
    folder = tmp_path_factory.mktemp("office")
    for path in BESIDE.glob("*.py"):
        shutil.copy(path, folder)
    with open_bench(
        folder,
        _GROUPS,
        {"window_cache_s": 0.2, "admission": "off"},
        general_settings={"custom_auth": "identities.user_api_key_auth"},
        router_settings={"num_retries": 0, "disable_cooldowns": True},
    ) as bench:
        for name in ("local", "hooked"):
            simulator = bench.simulators[name]
            simulator.unload(simulator.instances[0].id)
            # LM Studio's default: a request answers while another one's summary is held.
            simulator.load(KEY, bench.groups[name].window, parallel=4)
        yield bench
