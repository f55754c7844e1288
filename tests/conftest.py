"""Hypothesis profiles, which files are run by the same process, in which order, and which of them are slow.

The profile `ci` always tries the same examples, `deep` (HYPOTHESIS_PROFILE=deep) many random ones; `quick`, which
`-m "not slow"` uses, tries few. A test that needs more than others asks for a multiple of the profile's.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import certifi
import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

# LiteLLM asks the internet for prices when it is imported, and for eight seconds where there is none.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


# Made by the first of these processes, for all of them.
_ONE_AUTHORITY = "TESTS_ONE_AUTHORITY"


def _trust_one_authority() -> None:
    """Lets each HTTP client here, and in what is started here, read one certificate in place of all.

    No test speaks TLS, and each client reads all 140 again: 40 ms of processor time (httpx 0.28), a sixth of what the
    tests of `simulator`, `cli`, `proxy` and `windows` took together.
    """
    if _ONE_AUTHORITY not in os.environ:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        first, end, _ = Path(certifi.where()).read_text(encoding="utf-8").partition("-----END CERTIFICATE-----\n")
        file = Path(folder) / "one.pem"
        file.write_text(first + end, encoding="utf-8")
        os.environ[_ONE_AUTHORITY] = os.environ["SSL_CERT_FILE"] = str(file)
    # For clients that read nothing of the environment.
    certifi.where = lambda: os.environ[_ONE_AUTHORITY]


_trust_one_authority()

# Conversations are large values; building them is not what is being tested.
_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60, suppress_health_check=_SLOW)
settings.register_profile("quick", derandomize=True, deadline=None, max_examples=10, suppress_health_check=_SLOW)
settings.register_profile("deep", deadline=None, max_examples=2000, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Folders and files that share what is dear to start or to load: proxies, an engine, vocabularies (the largest takes
# four seconds of processor time). The first that fits counts.
_TOGETHER = {
    "integration/test_restart_": "restart",
    "integration/test_notices": "restart",
    "processes/": "processes",
    "real_engine/": "processes",
    **{f"security/test_{name}": "office" for name in ("body", "debug", "faults", "large", "store", "tenants")},
    "tokenizers/": "vocabularies",
    "tokens/": "vocabularies",
}
# These files of `integration` ask the same deployments: what has been learned of them is kept.
_PROMISES = (
    "test_accounting",
    "test_alarm",
    "test_bad_input",
    "test_every_route",
    "test_leaving",
    "test_other_providers",
    "test_promises",
    "test_routing",
    "test_untouched",
)
# What takes longest, first: a file that takes half a minute must not be the last to begin.
_LONGEST = ("processes", "promises", "restart", "office")

# What `-m "not slow"` leaves out beside the tests that are marked `proxy`: folders and files of `tests`.
_SLOW_PLACES = (
    "processes/",
    "real_engine/",
    "security/test_body.py",
    "security/test_faults.py",
    "security/test_resources.py",
    "security/test_shared_store.py",
    "security/test_tenants.py",
    "tokenizers/test_registry.py",
    "proxy/answer/test_loop_seeded.py",
)
# What only `.ci/full` runs, beside the tests that are marked `full`.
_FULL_PLACES = (
    "processes/test_newcomer.py",
    "real_engine/test_cut_answers.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Fewer examples where only the fast tests are asked for."""
    if _is_fast(config) and "HYPOTHESIS_PROFILE" not in os.environ:
        settings.load_profile("quick")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Looks for no garbage among what is imported, here or in any test: it stays to the end.

    The collector took 2.4 of the 13 s of processor time that it costs to collect all tests, and takes half as long as
    it did while they run (1.9 s of 45, not 3.7 of 49).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _is_fast(config: pytest.Config) -> bool:
    return "not slow" in str(config.getoption("markexpr"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What the fast tests leave out is not imported: the clients of the others are large."""
    return True if _is_fast(config) and _is_in(collection_path, _SLOW_PLACES) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is not for every few minutes of work, and leaves out what only `.ci/full` runs."""
    for item in items:
        if item.get_closest_marker("proxy") is not None or _is_in(item.path, _SLOW_PLACES):
            item.add_marker(pytest.mark.slow)
        if _is_in(item.path, _FULL_PLACES):
            item.add_marker(pytest.mark.full)
    if "full" not in str(config.getoption("markexpr")):
        left_out = [item for item in items if item.get_closest_marker("full") is not None]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.get_closest_marker("full") is None]


@cache
def _is_in(path: Path, places: tuple[str, ...]) -> bool:
    tests = Path(__file__).parent
    return path.is_relative_to(tests) and f"{path.relative_to(tests).as_posix()}/".startswith(places)


class _TogetherScheduling(LoadFileScheduling):  # type: ignore[misc] # pytest-xdist's types are not exported
    """Like `--dist loadfile`; files that share proxies go to the same process, and long ones begin first."""

    def _assign_work_unit(self, node: Any) -> None:
        waiting = {PurePath(scope).stem: scope for scope in reversed(self.workqueue)}
        first = next((waiting[name] for name in _LONGEST if name in waiting), None)
        if first is not None:
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        name = PurePath(file).stem
        if name in _PROMISES and "integration/" in file:
            return "promises"
        return next((group for place, group in _TOGETHER.items() if f"tests/{place}" in file), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedules `--dist loadfile` so that few proxies have to be started twice."""
    return _TogetherScheduling(config, log) if config.getoption("dist") == "loadfile" else None
