"""Where LiteLLM makes prompts smaller itself it goes first, and the guard takes what it leaves: never both at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders import talk
from tests.integration.bench import Bench, Group, open_bench

_WINDOW = 4096
_TIERS = ("SIMPLE", "MEDIUM", "COMPLEX", "REASONING")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """LiteLLM's `compression_interception`, and its auto-router over guarded models, as `doctor` wants it."""
    router = {
        "model_name": "smart",
        "litellm_params": {
            "model": "auto_router/complexity_router",
            "complexity_router_config": {"tiers": dict.fromkeys(_TIERS, "small"), "context_compaction": False},
            "complexity_router_default_model": "small",
        },
    }
    compress = {
        "callbacks": ["compression_interception"],
        "compression_interception_params": {"enabled": True, "compression_trigger": 1200},
    }
    with open_bench(
        tmp_path_factory.mktemp("litellms"),
        [Group("small", _WINDOW)],
        {"background": "off", "notices": "off"},
        entries=[router],
        litellm_settings=compress,
    ) as opened:
        yield opened


def _said(name: str, tokens: int) -> list[dict[str, Any]]:
    return [message for message in talk(name, tokens) if message["role"] != "system"]


def _messages(bench: Bench, name: str, tokens: int) -> None:
    body = {"model": "small", "max_tokens": 200, "messages": _said(name, tokens)}
    answer = bench.proxy.post(body, "/v1/messages")
    assert answer.status_code == 200, answer.text


def _compactions(bench: Bench, since: int) -> int:
    return sum(": compacted model=" in line for line in bench.proxy.lines[since:])


def test_what_compress_leaves_too_long_is_compacted(bench: Bench) -> None:
    """Once, and the newest message stays."""
    watch, since = bench.watch("small"), len(bench.proxy.lines)
    _messages(bench, "still too long", 14_000)
    (chat,) = watch.chats
    assert not chat.truncated
    assert _compactions(bench, since) == 1
    assert watch.sent()[-1]["content"].endswith(_said("still too long", 14_000)[-1]["content"])
