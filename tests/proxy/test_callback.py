"""What stands when LiteLLM has loaded the handler: a place for our lines, and what LiteLLM reads behind it."""

from __future__ import annotations

import logging
import os
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import litellm
import pytest
from litellm.integrations.custom_logger import CustomLogger

from litellm_compaction.config import Settings
from litellm_compaction.errors import LiteLLMChanged
from litellm_compaction.proxy import callback, litellm_inside, refusals, service

_OFF = {"mode": "off", "page": "off", "store": "memory://"}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is set, and nothing is kept."""
    monkeypatch.setattr(litellm, "callback_settings", {"litellm_compaction": _OFF})
    for name in ("LM_STUDIO_API_BASE", "LITELLM_MASTER_KEY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("LITELLM_COMPACTION_HOME", str(tmp_path))
    monkeypatch.setattr(service, "configuration", dict)


@pytest.mark.parametrize("has_handlers", [False, True])
def test_our_lines_have_one_place(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    has_handlers: bool,
) -> None:
    """Standard error, as LiteLLM's have, each once; or where the operator has put them."""
    logger = logging.getLogger("litellm_compaction")
    own = {"filters": [], "handlers": [caplog.handler] * has_handlers, "level": 20 * has_handlers, "propagate": True}
    for name, value in own.items():
        monkeypatch.setattr(logger, name, value)
    callback.load_handler()
    logger.info("said %s", "by\nus")
    line = r"\d\d:\d\d:\d\d - litellm_compaction:INFO: said by\S+us\n"
    assert bool(re.fullmatch(line, capsys.readouterr().err)) is not has_handlers
    assert bool(caplog.records) is has_handlers
    assert os.environ["LM_STUDIO_API_BASE"]


def test_a_litellm_that_would_not_call_us_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CustomLogger, "async_pre_call_deployment_hook")
    with pytest.raises(LiteLLMChanged, match="async_pre_call_deployment_hook is missing"):
        callback.load_handler()


@pytest.mark.parametrize(
    ("general", "is_made"),
    [
        ({"store_model_in_db": True}, True),
        ({}, False),
        ({"master_key": "sk-own"}, False),
        ({"dangerously_permit_weak_or_unset_master_key": True}, False),
    ],
)
def test_what_litellm_reads_later_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, general: dict[str, Any], is_made: bool
) -> None:
    """LM Studio's address: it would send its conversations to OpenAI; and a key where it would not start without."""
    monkeypatch.setattr(service, "configuration", lambda: {"general_settings": general})
    service.provide_environment()
    assert os.environ["LM_STUDIO_API_BASE"] == "http://127.0.0.1:1234/v1"
    assert os.environ.get("LITELLM_MASTER_KEY", "").startswith("sk-") is is_made
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == ["master_key"] * is_made


class _Router(SimpleNamespace):
    __hash__ = object.__hash__


async def test_a_deployment_is_guarded_where_all_others_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own mode, also without a page: its server, which is down, is asked for the window."""
    params = {"model": "lm_studio/x", "api_base": "http://127.0.0.1:9/v1"}
    for mode in ("guard", "off"):
        entry = {"model_name": "x", "litellm_params": params, "model_info": {"compaction": {"mode": mode}}}
        find = {"get_deployment": lambda _, entry=entry: entry, "get_model_list": lambda *_, each=entry, **__: [each]}
        router = _Router(**find)
        vars(router).update(dict.fromkeys((*litellm_inside.FALLBACKS, litellm_inside.CHECKS)))
        monkeypatch.setattr(callback, "current_router", lambda router=router: router)
        handler = callback.CompactionHandler(Settings(mode="off", page="off", store="memory://"))
        asked = {"model": "x", "messages": [{"role": "user", "content": "Hi."}]}
        with pytest.raises(refusals.Refusal) if mode == "guard" else nullcontext():
            await handler.async_pre_call_hook(None, None, asked, "acompletion")
        if mode == "off":
            assert await handler.async_pre_call_deployment_hook({**params, **entry, "extra_body": {"n": 2}}, "") is None
        await handler.service.compactor.aclose()
