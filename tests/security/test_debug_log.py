"""Threat: a log or a metric that tells. Our lines, also at DEBUG, and our labels hold no word of a conversation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.proxy import callback
from litellm_compaction.proxy.metrics import Metrics
from tests.builders import ONE_ROUND, talk
from tests.integration.bench import Group, open_bench
from tests.proxy.test_metrics import FakeLibrary
from tests.security.hooks import ROUTES, WINDOW, Client, Scene, conversation, use_router, words_of

# LiteLLM's own.
pytestmark = pytest.mark.filterwarnings("ignore:.*`ReadOnly` qualifier:UserWarning")

# Planted in a conversation, in tools, in names and in headers.
_PLANTED = ("PLANTED-system", "PLANTED-newest", "PLANTED-tool", "PLANTED-user", "PLANTED-focus", "hunter2-PLANTED")


@pytest.mark.proxy
def test_our_lines_of_a_debug_log_hold_nothing_of_a_conversation(tmp_path: Path) -> None:
    """Streamed, whole, compacted, refused and failed; LiteLLM's own lines, which are not ours, have all of it."""
    settings = {"redact": "off"}
    debug = {"LITELLM_LOG": "DEBUG"}
    with open_bench(
        tmp_path, [Group("local")], settings, environ=debug, litellm_settings={"set_verbose": True}
    ) as bench:
        tool = {"type": "function", "function": {"name": "f", "description": "PLANTED-tool", "parameters": {}}}
        messages = [
            {"role": "system", "content": "PLANTED-system DB_PASSWORD=hunter2-PLANTED"},
            *(message for message in talk("PLANTED-user", ONE_ROUND) if message["role"] != "system"),
            {"role": "user", "content": "PLANTED-newest?"},
        ]
        compaction = {"metadata": {"compaction": {"now": True, "focus": "PLANTED-focus"}}}
        for stream in (False, True):
            body = {"model": "local", "messages": messages, "stream": stream, "user": "PLANTED-user", **compaction}
            assert bench.proxy.post({**body, "tools": [tool]}).status_code == 200
            long = [*messages[:1], {"role": "user", "content": "PLANTED-newest " * 6_000}]
            assert bench.proxy.post({**body, "messages": long}).status_code == 400
        lines = bench.proxy.logged(r".")
        ours = [line for line in lines if "litellm_compaction" in line]
        assert len(ours) >= 4, "nothing is told of these requests any more"
        assert [line[:300] for line in ours for word in _PLANTED if word in line] == []
        assert any(word in line for line in lines for word in _PLANTED), "LiteLLM did not write at DEBUG"


def _echo(body: Any) -> str:
    """A server that quotes all that it was sent, as an overflow of its window."""
    return f"reached context length of 900 tokens: {body}"


def _raises(scene: Scene) -> None:
    """A model whose failure quotes what it was asked."""

    async def fail(**arguments: Any) -> Any:
        scene.router.asked.append(arguments)
        raise RuntimeError(f"cannot answer {arguments['messages']}")

    scene.router.acompletion = fail  # type: ignore[method-assign]


def _no_store(scene: Scene) -> None:
    """A store whose failure quotes what it was to keep."""

    async def fail(*given: object, **named: object) -> Any:
        raise OSError(f"cannot keep {given} {named}")

    store = scene.handler._store
    for name in ("find", "put", "get_fact", "put_fact", "merge_fact"):
        setattr(store, name, fail)


def _odd(scene: Scene) -> None:
    """A fault of ours, whose message quotes the request."""

    async def fail(*given: Any, **named: Any) -> Any:
        raise KeyError(str((given, named)))

    scene.handler._compactor.prepare = fail  # type: ignore[method-assign]


# By what goes wrong: how the scene is changed, and what the client sends.
_TROUBLES: dict[str, tuple[Callable[[Scene], None], dict[str, Any]]] = {
    "nothing": (lambda scene: None, {}),
    "its answer is cut": (lambda scene: None, {"is_cut": True}),
    "the server quotes what it refuses": (lambda scene: None, {"refusal": _echo}),
    "the summary fails, quoting": (_raises, {}),
    "the answer cannot be carried on, quoting": (_raises, {"is_cut": True}),
    "the store fails, quoting": (_no_store, {}),
    "we fail, quoting": (_odd, {}),
}


@pytest.mark.parametrize("trouble", _TROUBLES)
@pytest.mark.parametrize("strategy", ["summary", "prune", "handoff"])
async def test_no_line_of_ours_tells_what_was_said(
    trouble: str, strategy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At DEBUG, tracebacks included, whatever goes wrong and whatever its error quotes."""
    change, sends = _TROUBLES[trouble]
    caplog.set_level(logging.DEBUG, "litellm_compaction")
    scene = Scene({"strategy": strategy})
    use_router(monkeypatch, scene.router)
    for group in ("carried", "hooked"):
        scene.router.entries[group]["model_info"]["compaction"]["context_length"] = 2 * WINDOW
    change(scene)
    for group in ("carried", "hooked"):
        for route in ROUTES:
            for rounds in (4, 8):
                await Client(
                    scene, "sk-alice", conversation(f"{group}-{route}", rounds), attempts=[group], route=route, **sends
                ).send()
        giant = [{"role": "user", "content": "CANARY-giant " * 4000}]
        await Client(scene, "sk-alice", giant, attempts=[group], **sends).send()
    ours = [record for record in caplog.records if record.name.startswith("litellm_compaction")]
    assert len(ours) >= 4, "nothing is told of these requests any more"
    formatter = logging.Formatter()
    assert {word for record in ours for word in words_of(formatter.format(record))} == set()


async def test_no_label_of_a_metric_is_what_a_client_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, users, ids, tags, texts: labels are the operator's groups and our own words, whoever asks for what."""
    library = FakeLibrary()
    monkeypatch.setattr(callback, "Metrics", partial(Metrics, lambda: library))
    scene = Scene()
    use_router(monkeypatch, scene.router)
    for number in range(10):
        planted = f"planted-{number}"
        chosen = dict.fromkeys(("user", "litellm_session_id", "safety_identifier", "service_tier", "odd"), planted)
        body = {**chosen, "tags": [planted], "stop": [planted], "metadata": {"tags": [planted], "model_group": planted}}
        shown = {
            "x-litellm-tags": planted,
            "x-litellm-end-user-id": planted,
            "user-agent": planted,
            "x-api-key": planted,
        }
        for group in ("carried", "hooked"):
            for rounds in (4, 40):
                await Client(
                    scene,
                    f"sk-nobody.{planted}",
                    conversation(planted, rounds),
                    call_id=planted,
                    attempts=[group],
                    body=body,
                    shown=shown,
                ).send()
    labels = {label for series in library.made.values() for values in series for label in values}
    assert labels <= {"carried", "hooked", "pre_request", "tool_response", "streaming", *_OUTCOMES}, labels
    assert {"carried", "hooked"} <= labels


_OUTCOMES = ("compacted", "reused", "fallback", "refused", "none", "observed")
