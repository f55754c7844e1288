"""`doctor` against a simulated LM Studio."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.cli.doctor import _judgement
from litellm_compaction.cli.proxy_process import Running, noted
from litellm_compaction.master_key import known_master_key
from litellm_compaction.proxy.config_check import note, problem
from litellm_compaction.proxy.litellm_inside import LACKS
from litellm_compaction.proxy.live_settings import KEY
from litellm_compaction.stores import open_store
from tests.cli.conftest import GPT_OSS, QWEN, Check, at, config, deployment
from tests.integration.plain_server import PlainServer
from tests.lmstudio_double import Address, Model, Simulator, serve

pytestmark = pytest.mark.usefixtures("without_lm_studio")


def test_what_is_said_of_many_places_is_said_once() -> None:
    """The places are named in one line; the last one counts the problems."""
    many = [note(f"m{number}", "it is old") for number in range(2)]
    assert [*_judgement([*many, problem("a", "it is gone")])] == [
        *("", "Problems:", "  ✗ a: it is gone"),
        *("", "Notes:", "  · m0, m1: it is old"),
        *("", "1 problem found."),
    ]


LM, OPENAI, DEAD = f"lm_studio/{QWEN}", "openai/gpt-5", "http://127.0.0.1:1/v1"
OPTED_IN, OPTED_OUT = {"compaction": {"enabled": True}}, {"compaction": {"enabled": False}}
WRITTEN = {"compaction": {"enabled": True, "context_length": 4096}}


@pytest.mark.parametrize(
    ("model", "api_base", "info", "code", "said"),
    [
        (LM, "{}/v1", {}, 0, ["guarded  yes: it is lm_studio/…", "window   8,192 tokens, from api/v1"]),
        (f"lm_studio/{GPT_OSS}", "{}/v1", {}, 0, [f"· local: {GPT_OSS} is not loaded"]),
        ("lm_studio/qwen/qwen-3-8b", "{}/v1", {}, 1, [f"correct the model: LM Studio has {QWEN}"]),
        (LM, DEAD, {}, 1, ["✗ local: LM Studio at", "does not answer. Start its server"]),
        (LM, "{}", {}, 1, ["but requests go below /v1: write {}/v1."]),
        (f"openai/{QWEN}", "{}/v1", {}, 0, ["guarded  yes: its server answers as LM Studio", "8,192 tokens"]),
        (f"openai/{QWEN}", DEAD, {}, 1, ["guarded  not known", "start it; if it is not LM Studio, write"]),
        (QWEN, "{}/v1", {}, 1, ["guarded  no: its server is not LM Studio; write", f"model: lm_studio/{QWEN}`"]),
        (OPENAI, None, {}, 1, ["guarded  no: its server", "✗ model_list: no deployment is guarded"]),
        (OPENAI, "https://api.example.com/v1", {}, 1, ["guarded  no: its server is not LM Studio; write"]),
        ("openrouter/x", None, OPTED_IN, 1, ["✗ local: Context limit not available", "compaction.context_length, as"]),
        (OPENAI, None, WRITTEN, 0, ["guarded  yes: model_info.compaction.enabled", "4,096 tokens, from operator"]),
        (OPENAI, None, OPTED_OUT, 1, ["guarded  no: model_info.compaction.enabled is fa"]),
        (LM, "{}/v1", {"compaction": {"mode": "off"}}, 1, ["guarded  no: its mode is off"]),
    ],
)
def test_a_deployment_is_told_what_to_change(
    check: Check, address: Address, model: str, api_base: str | None, info: dict[str, Any], code: int, said: list[str]
) -> None:
    """Not loaded, misspelt, not there, without /v1 or prefix, hosted, opted in: the report, and the line that helps."""
    params = {} if api_base is None else {"api_base": api_base.format(address.base_url)}
    found_code, found = check(config(deployment(model, params=params, info=info)))
    assert found_code == code, found
    assert "example.com" not in found, "hosted providers are never asked"
    assert [part for part in said if part.format(address.base_url) not in found] == [], found
    if "is not loaded" in said[0]:
        _, found = check(config(deployment(model, params=params), settings={"when_not_loaded": "error"}))
        assert "✗ local: " in found
        assert "load it in LM Studio" in found


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lambda simulator: setattr(simulator, "api", "v0"), 0, "from api/v0"),
        (lambda simulator: simulator.models.clear(), 1, "download a model (`lms get`)"),
        (lambda simulator: simulator.unload(QWEN), 0, "· lm_studio/*: * is not loaded"),
        (lambda simulator: setattr(simulator, "api_token", "sk-lm"), 1, "set LM_STUDIO_API_KEY"),
    ],
)
def test_another_lm_studio_is_read_too(check: Check, simulator: Simulator, change: Any, code: int, said: str) -> None:
    """An older one by its own API, and ones without a model, without a loaded model, and with a token."""
    if "lms get" in said:
        simulator.unload(QWEN)
    change(simulator)
    with serve(simulator) as address:
        document = config(deployment("lm_studio/*", "lm_studio/*", params=at(address)))
        found_code, found = check(document)
        assert (found_code, said in found) == (code, True), found
        if simulator.api_token:
            code, found = check(document, LM_STUDIO_API_KEY="sk-lm")
            assert (code, "sk-lm" in found.replace(f"{QWEN}", "")) == (0, False)


def test_an_opted_in_server_without_a_number_is_a_problem(check: Check, plain: PlainServer) -> None:
    """Who was asked, and what to write: its requests are refused."""
    params = {"api_base": f"{plain.base_url}/v1"}
    code, found = check(config(deployment("openai/x", params=params, info=OPTED_IN)))
    assert code == 1
    assert "Context limit not available for x. Please ensure model metadata is correct." in found
    assert "tells no context length (/props, /v1/models" in found
    assert "write model_info.compaction.context_length" in found


def test_settings_that_work_against_the_plug_in_are_notes(check: Check, simulator: Simulator, address: Address) -> None:
    """As LM Studio's own protocol tells them; nothing is generated or loaded for it."""
    simulator.sdk.overflow_policy = "rollingWindow"
    simulator.instances[0].ttl_s = 60
    code, found = check(config(deployment(params=at(address))))
    assert code == 0
    assert "settings a prompt that is too long: rollingWindow, unloaded after 1 min without a request" in found
    assert "stopAtLimit" in found
    assert "after 60 s" in found
    assert simulator.sdk.faults() == []
    simulator.wait_until(lambda: simulator.sdk.open_sockets() == [])


def test_it_looks_at_what_up_runs(
    check: Check, address: Address, environ: dict[str, str], write: Callable[..., Path]
) -> None:
    """Its server and its config, and says so; that a simulator answers, and which file does not run."""
    wildcard = deployment("lm_studio/*", "lm_studio/*", params={"api_base": "os.environ/LM_STUDIO_API_BASE"})
    runs = write(config(wildcard), "runs.yaml")
    what = Running("http://127.0.0.1:4000", str(runs), f"{address.base_url}/v1", is_simulated=True)
    with noted(what, environ):
        code, found = check(None)
        assert code == 0
        assert f"config   {runs}\n" in found
        assert f"up: it runs at http://127.0.0.1:4000 with {runs}." in found
        assert "SIMULATOR" in found
        assert "is not what it runs" not in found
        code, found = check(config(wildcard))
        assert (code, "is not what it runs" in found) == (0, True), "at the simulator, too"
    assert "up: " not in check(config(wildcard))[1]


def test_a_probe_compares_counts(check: Check, simulator: Simulator, address: Address) -> None:
    """Of each loaded model of a wildcard, with a tool; what is off has its own finding."""
    simulator.load(GPT_OSS, 16_384)
    _, found = check(config(deployment("lm_studio/*", "lm_studio/*", params=at(address))), "--probe")
    assert len(re.findall(r"probe    \d+ tokens by us, \d+ by the server \([+-]", found)) == 2
    assert len(re.findall(rf"lm_studio/\* → ({QWEN}|{GPT_OSS}): \d+ tokens by us", found)) == 2


def test_a_stand_in_may_be_off(check: Check) -> None:
    """Usage corrects it, so it is a note, and exact counting is offered."""
    simulator = Simulator([Model("someone/unknown", architecture="unheard")])
    simulator.load("someone/unknown", 8192)
    with serve(simulator) as address:
        code, found = check(config(deployment("lm_studio/someone/unknown", params=at(address))), "--probe")
    assert "a stand-in that errs high" in found
    assert (code, "✗" in found) == (0, False), found


def test_another_server_is_probed_where_it_has_loaded_its_model(check: Check, plain: PlainServer) -> None:
    """llama.cpp's has one model, and has it loaded; a probe may load nothing."""
    plain.gets["/props"] = {"default_generation_settings": {"n_ctx": 6144}}
    params = {"api_base": f"{plain.base_url}/v1"}
    document = config(deployment("openai/qwen3", params=params, info=OPTED_IN))
    assert " tokens by us, " in check(document, "--probe")[1]
    del plain.gets["/props"]
    assert "  probe " not in check(config(deployment("openai/qwen3", params=params, info=WRITTEN)), "--probe")[1]


def test_what_the_proxies_know_is_told(check: Check, address: Address, tmp_path: Path) -> None:
    """What their LiteLLM lacks, and what was changed on the page."""
    url = f"sqlite:///{tmp_path / 'store.sqlite3'}"

    async def keep() -> None:
        store = open_store(url, ttl_s=3600.0, max_bytes=1 << 20, secret=lambda: known_master_key(os.environ))
        await store.put_fact(*LACKS, "Router.registry is missing.\nproxy_server.app is missing, too.")
        await store.put_setting(KEY, '{"mode": "observe"}')
        await store.aclose()

    asyncio.run(keep())
    code, found = check(config(deployment(params=at(address)), settings={"store": url}))
    assert code == 1
    assert "✗ LiteLLM: the proxy that runs with this store, or ran last, says: Router.registry is missing." in found
    assert "or ran last, says: proxy_server.app is missing, too." in found
    assert "in place of config.yaml's values: mode: observe." in found


def test_a_store_that_does_not_answer_is_a_problem(check: Check, address: Address) -> None:
    """It passes by itself; its password is not shown."""
    settings = {"store": "redis://:hunter2@127.0.0.1:9"}
    code, found = check(config(deployment(params=at(address)), settings=settings))
    assert (code, "✗ store: " in found, "hunter2" in found) == (1, True, False)
