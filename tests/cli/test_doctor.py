"""`doctor` against a simulated LM Studio."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.cli.doctor import _grouped, doctor
from litellm_compaction.cli.running import Running, told
from litellm_compaction.events import event_to_json
from litellm_compaction.proxy.config_check import note
from litellm_compaction.proxy.litellm_router import LACKS
from litellm_compaction.stores import open_store
from tests.cli.conftest import GPT_OSS, QWEN, Report, at, config, deployment, messages
from tests.integration.plain_server import PlainServer
from tests.lmstudio_double import Address, Model, Simulator, serve
from tests.test_events import event

pytestmark = pytest.mark.usefixtures("without_lm_studio")


def test_what_is_said_of_many_places_is_said_once() -> None:
    """The first three are named, the others counted; up to three have a line each."""
    many = [note(f"m{number}", f"m{number} is not loaded") for number in range(5)]
    few = [note("a", "it is old"), note("b", "it is old")]
    assert [*_grouped([*many, *few])] == ["m0, m1, m2 and 2 more: … is not loaded", "a: it is old", "b: it is old"]


DEAD = "http://127.0.0.1:1/v1"
OPTED_IN = {"compaction": {"enabled": True}}
WRITTEN = {"compaction": {"enabled": True, "context_length": 4096}}


@pytest.mark.parametrize(
    ("model", "api_base", "info", "code", "said", "row"),
    [
        (f"lm_studio/{GPT_OSS}", "{}/v1", {}, 0, "is not loaded", {"loaded": False}),
        ("lm_studio/qwen/qwen-3-8b", "{}/v1", {}, 1, f"LM Studio has {QWEN}", {}),
        (f"lm_studio/{QWEN}", DEAD, {}, 1, "start LM Studio's server", {"reachable": False, "guarded": None}),
        (f"lm_studio/{QWEN}", "{}", {}, 1, "but requests go below /v1: write {}/v1.", {}),
        (f"openai/{QWEN}", "{}/v1", {}, 0, "", {"guarded": True, "why": "its server answers as LM Studio"}),
        (QWEN, "{}/v1", {}, 1, f"has this model: write `model: lm_studio/{QWEN}`.", {}),
        ("openai/gpt-5", None, {}, 1, "no deployment is guarded", {"guarded": False}),
        ("openai/gpt-4o", None, OPTED_IN, 0, "", {"window_tokens": 128_000, "window_source": "model_map"}),
        ("openrouter/x", None, OPTED_IN, 0, "assumed to be 128,000 tokens: write", {"window_source": "default"}),
        ("openai/gpt-5", None, WRITTEN, 0, "", {"guarded": True, "window_tokens": 4096, "window_source": "operator"}),
        ("llamafile/x", DEAD, WRITTEN, 1, "start the server, or correct api_base", {"window_tokens": 4096}),
    ],
)
def test_a_deployment_is_told_what_to_change(
    report: Report,
    address: Address,
    model: str,
    api_base: str | None,
    info: dict[str, Any],
    code: int,
    said: str,
    row: dict[str, Any],
) -> None:
    """Not loaded, misspelt, not there, without /v1 or prefix, hosted, opted in: the row, and the line that helps."""
    params = {} if api_base is None else {"api_base": api_base.format(address.base_url)}
    found_code, found = report(config(deployment(model, params=params, info=info)))
    assert found_code == code
    assert said.format(address.base_url) in " ".join(messages(found, "problem" if code else "note"))
    assert {key: found["deployments"][0][key] for key in row} == row
    if "is not loaded" in said:
        _, found = report(config(deployment(model, params=params), settings={"when_not_loaded": "error"}))
        assert "load it in LM Studio" in messages(found)[0]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lambda simulator: setattr(simulator, "api", "v0"), 0, ""),
        (lambda simulator: simulator.models.clear(), 1, "LM Studio has no chat model: download one (`lms get`)."),
    ],
)
def test_another_lm_studio_is_read_too(report: Report, simulator: Simulator, change: Any, code: int, said: str) -> None:
    """An older one by its own API, and one without models: no request can load one."""
    simulator.unload(QWEN) if code else None
    change(simulator)
    with serve(simulator) as address:
        found_code, found = report(config(deployment("lm_studio/*", "lm_studio/*", params=at(address))))
    assert (found_code, messages(found)) == (code, [said] if said else [])
    assert code or found["deployments"][0]["window_source"] == "api/v0"


def test_a_bypassed_carrier_is_a_problem(report: Report, address: Address, environ: dict[str, str]) -> None:
    """LiteLLM's experimental handler ignores the client that carries answers over the limit: say so."""
    environ["EXPERIMENTAL_OPENAI_BASE_LLM_HTTP_HANDLER"] = "true"
    code, found = report(config(deployment(params=at(address))))
    assert (code, found["deployments"][0]["carrier"]) == (1, "hooks")
    assert any("ignores the client" in message for message in messages(found, "problem"))


def test_a_refused_token_is_a_problem(report: Report, simulator: Simulator, address: Address) -> None:
    """With the variable to set; and with it, all is well."""
    simulator.api_token = "sk-lm-token"
    document = config(deployment(params=at(address)))
    code, found = report(document)
    assert code == 1
    [message] = messages(found)
    assert "LM_STUDIO_API_KEY" in message
    code, found = report(document, LM_STUDIO_API_KEY="sk-lm-token")
    assert code == 0
    assert "sk-lm-token" not in json.dumps(found)


@pytest.mark.parametrize(
    ("model", "params"),
    [
        ("openai/gpt-5", {}),
        ("openai/gpt-5", {"api_base": "https://api.example.com/v1"}),
        ("anthropic/claude-sonnet-5", {}),
        ("openrouter/some/model", {"api_base": "http://127.0.0.1:1/v1"}),
    ],
)
def test_hosted_providers_are_never_asked(report: Report, address: Address, model: str, params: dict[str, str]) -> None:
    """No request leaves for them: reachable stays unknown, and the reason says how to opt in."""
    code, found = report(config(deployment(params=at(address)), deployment(model, "hosted", params=params)))
    assert code == 0
    row = found["deployments"][1]
    assert (row["guarded"], row["reachable"], row["server"]) == (False, None, "")
    assert "model_info.compaction.enabled" in row["why"]


def test_an_opted_in_server_without_a_number_is_a_problem(report: Report, plain: PlainServer) -> None:
    """Who was asked, and what to write: its requests are refused."""
    info = {"compaction": {"enabled": True}}
    code, found = report(config(deployment("openai/x", params={"api_base": f"{plain.base_url}/v1"}, info=info)))
    assert code == 1
    [row] = found["deployments"]
    assert (row["guarded"], row["reachable"], row["window_tokens"]) == (True, True, None)
    (said,) = messages(found)
    assert "Context limit not available for x. Please ensure model metadata is correct." in said
    assert "tells no context length (/props, /v1/models, /api/ps)" in said
    assert "write model_info.compaction.context_length" in said


@pytest.mark.parametrize("place", ["settings", "deployment"])
def test_a_wrong_tokenizer_is_a_problem(report: Report, address: Address, place: str) -> None:
    """As the proxy would say at start."""
    own = {"tokenizer": "/nonexistent/model.gguf"}
    info = {"info": {"compaction": own}} if place == "deployment" else {}
    document = config(deployment(params=at(address), **info), settings=own if place == "settings" else None)
    code, found = report(document)
    assert code == 1
    assert any("tokenizer = '/nonexistent/model.gguf': it cannot be read" in message for message in messages(found))


def test_settings_that_work_against_the_plug_in_are_notes(
    report: Report, simulator: Simulator, address: Address
) -> None:
    """As LM Studio's own protocol tells them; nothing is generated or loaded for it."""
    simulator.sdk.overflow_policy = "rollingWindow"
    simulator.instances[0].ttl_s = 60
    code, found = report(config(deployment(params=at(address))))
    assert code == 0
    [row] = found["deployments"]
    assert row["model_settings"] == "a prompt that is too long: rollingWindow, unloaded after 1 min without a request"
    assert [key for key in ("stopAtLimit", "after 60 s") if key in " ".join(messages(found, "note"))] == [
        "stopAtLimit",
        "after 60 s",
    ]
    assert simulator.sdk.faults() == []
    simulator.wait_until(lambda: simulator.sdk.open_sockets() == [])


@pytest.mark.parametrize("variable", ["NUM_WORKERS", "DEFAULT_NUM_WORKERS_LITELLM_PROXY"])
def test_workers_that_share_a_context_are_a_note(
    report: Report, simulator: Simulator, address: Address, variable: str
) -> None:
    """Where they share no store, room is reserved in each by itself: said of several, and a context that is shared."""
    document = config(deployment(params=at(address)), settings={"store": "memory://"})
    _, found = report(document, **{variable: "1"})
    assert not any("workers" in message for message in messages(found, "note"))
    code, found = report(document, **{variable: "4"})
    assert code == 0
    assert any("each of the 4 workers" in message for message in messages(found, "note"))
    _, found = report(config(deployment(params=at(address))), **{variable: "4"})
    assert not any("workers" in message for message in messages(found, "note"))
    # One slot: nobody shares its context.
    simulator.unload(simulator.instances[0].id)
    simulator.load(QWEN, 8192, parallel=1)
    _, found = report(document, **{variable: "4"})
    assert not any("workers" in message for message in messages(found, "note"))


def test_what_the_proxies_know_is_told(report: Report, address: Address, tmp_path: Path) -> None:
    """A model whose summaries say nothing, from the history that they keep; and what their LiteLLM lacks."""
    url = f"sqlite:///{tmp_path / 'store.sqlite3'}"

    async def keep() -> None:
        store = open_store(url, ttl_s=3600.0, max_bytes=1 << 20)
        for number in range(6):
            row = event("fallback", pruning_model="tiny", reason="loop")
            await store.add_event(time.time() + number, event_to_json(row))
        await store.put_fact(*LACKS, "Router.registry is missing.")
        await store.aclose()

    asyncio.run(keep())
    code, found = report(config(deployment(params=at(address)), settings={"store": url}))
    assert code == 1
    assert "the proxy that runs with this store, or ran last, says: Router.registry is missing." in messages(
        found, "problem"
    )
    [said] = [each for each in messages(found, "note") if each.startswith("tiny:")]
    assert "6 of 6" in said
    assert "max_summary_calls: 0" in said


def test_it_looks_at_what_up_runs(
    report: Report,
    address: Address,
    environ: dict[str, str],
    write: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its server and its config, and says so; that a simulator answers, and which file does not run."""
    wildcard = deployment("lm_studio/*", "lm_studio/*", params={"api_base": "os.environ/LM_STUDIO_API_BASE"})
    runs = write(config(wildcard), "runs.yaml")
    what = Running("http://127.0.0.1:4000", str(runs), f"{address.base_url}/v1", is_simulated=True)
    with told(what, environ):
        assert doctor(config=None, as_json=True, environ=environ) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["config"] == str(runs)
        assert f"it runs at http://127.0.0.1:4000 with {runs}." in messages(found, "note")
        assert any("SIMULATOR" in message for message in messages(found, "note"))
        assert not any("is not what runs" in message for message in messages(found, "note"))
        code, found = report(config(wildcard))
        assert code == 0, "at the simulator, too"
        assert any("is not what runs" in message for message in messages(found, "note"))
    _, found = report(config(wildcard))
    assert not any(finding["place"] == "up" for finding in found["findings"])


pytestmark = pytest.mark.usefixtures("without_lm_studio")


def test_findings_behind_a_wildcard_name_the_model(report: Report, simulator: Simulator, address: Address) -> None:
    """Of two that are off in different ways, each has its own."""
    simulator.load(GPT_OSS, 16_384)
    _, found = report(config(deployment("lm_studio/*", "lm_studio/*", params=at(address))), probes=True)
    places = {finding["place"] for finding in found["findings"] if "our count" in finding["message"]}
    assert places == {f"lm_studio/* → {QWEN}", f"lm_studio/* → {GPT_OSS}"}


def test_a_stand_in_may_be_off(report: Report) -> None:
    """Usage corrects it, so it is a note, and exact counting is offered."""
    simulator = Simulator([Model("someone/unknown", architecture="unheard")])
    simulator.load("someone/unknown", 8192)
    with serve(simulator) as address:
        code, found = report(config(deployment("lm_studio/someone/unknown", params=at(address))), probes=True)
    assert found["deployments"][0]["tokenizer_source"] == "stand_in"
    assert code == 0
    assert all("usage corrects it" in message for message in messages(found, "note") if "our count" in message)


def test_another_server_is_probed_where_it_loads_nothing_for_it(report: Report, plain: PlainServer) -> None:
    """llama.cpp's has one model, and has it loaded; Ollama would load what it is asked for."""
    plain.gets["/props"] = {"default_generation_settings": {"n_ctx": 6144}}
    info = {"compaction": {"enabled": True}}
    _, found = report(
        config(deployment("openai/qwen3", params={"api_base": f"{plain.base_url}/v1"}, info=info)), probes=True
    )
    assert [probe["tools"] for probe in found["deployments"][0]["probes"]] == [False, True]
    del plain.gets["/props"]
    plain.gets["/api/ps"] = {"models": [{"name": "qwen3:latest", "context_length": 16384}]}
    params = {"api_base": plain.base_url}
    _, found = report(config(deployment("ollama_chat/qwen3", params=params, info=info)), probes=True)
    assert (found["deployments"][0]["window_source"], found["deployments"][0]["probes"]) == ("ollama", [])
