"""What is known of a deployment is reported, and what is not known keeps nobody waiting."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from litellm_compaction.config import Settings
from litellm_compaction.engine import Standing
from litellm_compaction.errors import ModelNotLoaded
from litellm_compaction.proxy.report import Reporter
from litellm_compaction.proxy.routing import deployment_of
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokenizers.sources import bundled
from litellm_compaction.windows.windows import Windows
from tests import virtual_time
from tests.windows.fake_lmstudio import BASE, FakeLMStudio, v1_model

_LIMIT_S = 4.0


class _Known:
    """Stands for what counts prompts, and for what servers have shown of going on."""

    async def source(self, target: Any, architecture: str, wanted: Any, **options: Any) -> Any:
        return bundled(family_of(architecture, target.model))

    async def standing(self, target: Any, source: str, **options: Any) -> Standing:
        return Standing()


async def reported(server: FakeLMStudio, model: str) -> list[tuple[str, int | None, bool]]:
    """Model, window, and if it is known to be not loaded, of each report about a deployment."""
    deployment = deployment_of({"model": f"lm_studio/{model}", "api_base": BASE}, {}, group="local", environ={})
    known: Any = _Known()
    async with httpx.AsyncClient(transport=httpx.MockTransport(server.handle)) as http:
        windows = Windows(cache_s=5.0, http=http, timeout_s=10 * _LIMIT_S)
        reporter = Reporter(windows, known, known, limit_s=_LIMIT_S, environ={})
        found = await reporter.reports(deployment, Settings())
        await windows.aclose()
    return [
        (each.target.model, each.window.tokens if each.window else None, isinstance(each.absence, ModelNotLoaded))
        for each in found
    ]


async def test_a_wildcard_has_a_report_for_each_loaded_model() -> None:
    """Of those that its pattern reaches; its own where there is none."""
    server = FakeLMStudio()
    server.list_v1(v1_model("qwen/one", _=12288), v1_model("qwen/two", _=4096), v1_model("other", _=2048))
    assert await reported(server, "qwen/*") == [("qwen/one", 12288, False), ("qwen/two", 4096, False)]
    assert await reported(server, "none/*") == [("none/*", None, False)]


async def test_a_model_that_is_not_loaded_is_reported_as_that() -> None:
    """Without a window; the error is kept for whoever shows it."""
    server = FakeLMStudio()
    server.list_v1(v1_model("qwen/one"))
    assert await reported(server, "qwen/one") == [("qwen/one", None, True)]


def test_a_server_that_does_not_answer_ends_no_report() -> None:
    """After the limit there is one without a window."""

    async def waiting() -> tuple[list[tuple[str, int | None, bool]], float]:
        server, begun_s = FakeLMStudio(gate=asyncio.Event()), asyncio.get_running_loop().time()
        found = await reported(server, "qwen/one")
        return found, asyncio.get_running_loop().time() - begun_s

    found, took_s = virtual_time.run(waiting())
    assert found == [("qwen/one", None, False)]
    assert took_s == _LIMIT_S
