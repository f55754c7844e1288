"""What of LiteLLM the guard stands on, by the newer entry points or the older members, and what is said without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import litellm
import pytest

from litellm_compaction.errors import LiteLLMChanged
from litellm_compaction.proxy import litellm_inside as litellm_router
from litellm_compaction.proxy.litellm_inside import Seam, check_classes, look, missing
from litellm_compaction.proxy.routing import reachable_entries

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

_ENTRY = {"model_name": "a", "litellm_params": {"model": "lm_studio/a"}, "model_info": {"id": "1"}}
_SETTINGS = {
    "fallbacks": [{"a": ["b"]}],
    "context_window_fallbacks": [{"a": ["c"]}],
    "content_policy_fallbacks": None,
    "enable_pre_call_checks": False,
}


def _entries(name: str | None = None, team_id: str | None = None) -> list[dict[str, Any]]:
    return [_ENTRY] if name in (None, "a") else []


def _named(lacks: str, **members: Any) -> Any:
    return SimpleNamespace(**{name: value for name, value in members.items() if name != lacks})


def older(lacks: str = "") -> Any:
    """A router with members of its own, as far as we use it."""
    get_deployment = {"1": _ENTRY}.get
    return _named(lacks, get_deployment=get_deployment, get_model_list=_entries, model_list=[_ENTRY], **_SETTINGS)


def newer(lacks: str = "") -> Any:
    """A router with entry points; its old members are gone."""
    registry = _named(lacks, deployment={"1": _ENTRY}.get, deployments=_entries, all=lambda: [_ENTRY])
    settings = _named(lacks, **_SETTINGS)
    return _named(lacks, registry=lambda: registry, settings=lambda: settings)


@pytest.mark.parametrize("make", [older, newer])
async def test_a_router_of_either_kind_says_what_it_has_and_what_it_lacks(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A group with its fallbacks, an id, a setting; each member that is gone by its name."""
    router = make()
    assert await look((router, False)) is None
    assert reachable_entries(router, "a", {}) == reachable_entries(router, "1", {}) == [_ENTRY]
    assert litellm_router.deployment(router, "1") is _ENTRY
    assert not litellm_router.setting(router, litellm_router.CHECKS)
    own = ("get_deployment", "get_model_list") if make is older else ("deployment", "deployments")
    for member in (*own, *_SETTINGS):
        caplog.clear()
        fault = await look((make(member), False))
        assert [str(fault)] == caplog.messages
        assert f"{member} is missing or has changed" in str(fault)


async def test_a_client_that_litellm_passes_on_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that it does not pass on is a fault; other callbacks are told of neither."""
    told: list[Any] = []
    monkeypatch.setattr(litellm, "success_callback", [lambda *args: told.append(args)])
    assert await look((older(), True)) is None
    monkeypatch.setenv("EXPERIMENTAL_OPENAI_BASE_LLM_HTTP_HANDLER", "true")
    fault = await look((older(), True))
    assert "client= is missing" in str(fault)
    assert "`carrier: hooks`" in str(fault)
    assert told == []


def test_a_hook_that_nobody_would_call_stops_the_start() -> None:
    """By its name."""
    check_classes(["async_pre_call_hook"])
    with pytest.raises(LiteLLMChanged, match=r"CustomLogger\.async_no_hook is missing"):
        check_classes(["async_no_hook"])


@pytest.mark.parametrize(
    ("members", "is_missing"),
    [
        ({}, True),
        ({"old": lambda: 1}, False),
        ({"old": lambda: 1, "new": lambda: 2}, False),
        ({"new": "no function"}, True),
    ],
    ids=["gone", "where it was", "where it is", "of another kind"],
)
def test_a_piece_is_found_where_litellm_has_it_now(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, members: dict[str, Any], is_missing: bool
) -> None:
    """The first place that has it in a form that we can use; what is missing is a sentence that says what is lost."""
    seam = Seam.REQUESTS
    monkeypatch.setattr(seam, "places", (":inside.new()", ":inside.old()"))
    monkeypatch.setattr(litellm, "inside", SimpleNamespace(**members), raising=False)
    assert seam.is_missing is is_missing
    assert seam.get() is (None if is_missing else members.get("new", members.get("old")))
    said = [f"litellm.inside.new of LiteLLM's is missing or has changed: {seam.lost}."] if is_missing else []
    assert [*missing()] == caplog.messages == said
