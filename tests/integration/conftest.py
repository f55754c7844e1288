"""Proxies that several files share, and the check of promise P1 after every test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.bench import OPEN, Bench, Group, open_bench
from tests.integration.plain_server import PlainServer, plain_entries, serve_plain
from tests.integration.restart_bench import Carrier, Restarting, shared
from tests.integration.routes import Servers, open_routes, serve_others
from tests.integration.rows import Rows

# Several tests change what a group's simulator says or has loaded; these groups are theirs alone.
_GROUPS = [
    Group("local"),
    Group("one-slot", slots=1),
    Group("twin"),
    Group("left"),
    Group("shrinking", 16384),
    Group("small", 4096),
    Group("doubted", 4096, factor=0.8, speaks=False),
]
_SABOTAGED = [Group(key, key=key, guarded=False) for key in ("sabotaged-count", "sabotaged-learn")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """LiteLLM leaves connections to the garbage collector, which comes in any test; its own process told nobody."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))


@pytest.fixture(autouse=True)
def _never_over_the_window() -> Iterator[None]:
    """P1: whatever a test did, no guarded request and none of our own calls went over its window."""
    yield
    assert [finding for bench in OPEN for finding in bench.findings()] == []


@pytest.fixture(scope="session")
def plain() -> Iterator[PlainServer]:
    """An OpenAI- and Anthropic-like server that is not LM Studio and keeps every byte that it gets."""
    with serve_plain() as server:
        yield server


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory, plain: PlainServer) -> Iterator[Bench]:
    """The defaults, but that a window is looked up anew after a fifth of a second."""
    entries = plain_entries(plain.base_url)
    with open_bench(_folder(tmp_path_factory), _GROUPS, {"window_cache_s": 0.2}, entries=entries) as bench:
        yield bench


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory, plain: PlainServer) -> Iterator[Bench]:
    """The same model list in a proxy without our callback."""
    groups = [replace(group, guarded=False) for group in _GROUPS if group.name in ("local", "one-slot", "small")]
    with open_bench(_folder(tmp_path_factory), groups, None, entries=plain_entries(plain.base_url)) as bench:
        yield bench


@pytest.fixture(scope="session")
def permissive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Before models at which our own code fails; no test may rely on a summary here."""
    with open_bench(
        _folder(tmp_path_factory),
        [Group("local"), *_SABOTAGED],
        {"window_cache_s": 0.2, "summary_timeout_s": 4, "page": False},
        litellm_settings={"callbacks": ["sabotage.handler"]},
    ) as bench:
        yield bench


@pytest.fixture(scope="session")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A window once read is trusted for minutes; notices are sent as reasoning; the store is a file in a file.

    What LM Studio's own protocol would notice at once (test_ask_server.py) has to be learned from answers.
    """
    folder = _folder(tmp_path_factory)
    (folder / "file").write_text("not a folder")
    with open_bench(
        folder,
        [
            Group("local"),
            Group("asked", 16384, simulator={"truncated_usage": "kept"}),
            *(Group(f"cut-{how}", 16384, simulator={"truncated_usage": "kept"}) for how in ("plain", "stream")),
        ],
        {
            "window_cache_s": 3600,
            "ask_server": False,
            "notices": "reasoning",
            "store": f"sqlite:///{folder}/file/store",
        },
    ) as bench:
        yield bench


@pytest.fixture(scope="module")
def carrier(request: pytest.FixtureRequest) -> Carrier:
    """The transport; tests that `both_carriers` marks run by LiteLLM's hooks, too."""
    chosen: Carrier = getattr(request, "param", "auto")
    return chosen


@pytest.fixture(scope="module")
def restarting(request: pytest.FixtureRequest, carrier: Carrier) -> Restarting:
    """Models that talk past their windows."""
    return shared(request, carrier)


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Servers that are not LM Studio; none of them is known to another proxy than `routes`."""
    with serve_others() as made:
        yield made


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """What is billed in `routes`."""
    return Rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="session")
def routes(tmp_path_factory: pytest.TempPathFactory, servers: Servers, rows: Rows) -> Iterator[Bench]:
    """Many kinds of deployments, fallbacks and an alias, for keys of several users."""
    with open_routes(_folder(tmp_path_factory), servers, rows) as bench:
        yield bench


def _folder(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("proxy")
