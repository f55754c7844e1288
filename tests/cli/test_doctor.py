"""`doctor` against a simulated LM Studio."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.cli.doctor import _grouped, doctor
from litellm_compaction.cli.up import RUNNING_FILE
from litellm_compaction.config import Settings
from litellm_compaction.errors import CompactionError
from litellm_compaction.events import event_to_json
from litellm_compaction.proxy.config_check import note
from litellm_compaction.proxy.live_settings import KEY as CHANGED_SETTINGS
from litellm_compaction.proxy.live_settings import Overlay
from litellm_compaction.simulator import Address, Reply, Simulator, serve
from litellm_compaction.stores import open_store
from litellm_compaction.tokenizers import registry
from tests.cli.conftest import GPT_OSS, QWEN, Report, at, config, deployment, messages
from tests.integration.plain_server import PlainServer
from tests.test_events import event
from tests.tokenizers.gguf_writer import bpe_fields, gguf

pytestmark = pytest.mark.usefixtures("without_lm_studio")


def test_a_loaded_model_is_described(report: Report, address: Address) -> None:
    """Guarded, reachable, loaded, with its window, source, family and tokenizer."""
    code, found = report(config(deployment(params=at(address))))
    assert code == 0
    assert found["ok"]
    [row] = found["deployments"]
    assert row == {
        "name": "local",
        "model": QWEN,
        "guarded": True,
        "why": "it is lm_studio/…",
        "server": f"{address.base_url}/v1",
        "reachable": True,
        "api": "v1",
        "loaded": True,
        "window_tokens": 8192,
        "window_source": "api/v1",
        "parallel": 4,
        "architecture": "qwen3",
        "family": "qwen3",
        "tokenizer": "qwen2",
        "tokenizer_exact": True,
        "tokenizer_source": "pack",
        "tokenizer_words": "qwen2, the model's own from this package",
        "template_words": "the one that LM Studio says is in effect",
        "model_settings": "a prompt that is too long: truncateMiddle",
        "probes": [],
        "carrier": "transport",
        "ways": ["raw", "prefill", "turn"],
        "gone_on": [],
    }


def test_the_text_report_says_the_same(
    write: Callable[..., Path], environ: dict[str, str], address: Address, capsys: pytest.CaptureFixture[str]
) -> None:
    """For people: the window with its unit, and a last line that sums up."""
    path = write(config(deployment(params=at(address))))
    assert doctor(config=path, as_json=False, environ=environ) == 0
    text = capsys.readouterr().out
    assert "guarded  yes: " in text
    assert "window   8,192 tokens, from api/v1" in text
    assert "carrier  transport" in text
    assert "goes on  raw: the model goes on inside its answer" in text
    assert "with qwen2, the model's own from this package; template: " in text
    assert text.rstrip().endswith("No problems found.")


def test_what_is_said_of_many_places_is_said_once() -> None:
    """The first three are named, the others counted; up to three have a line each."""
    many = [note(f"m{number}", f"m{number} is not loaded") for number in range(5)]
    few = [note("a", "it is old"), note("b", "it is old")]
    assert [*_grouped([*many, *few])] == ["m0, m1, m2 and 2 more: … is not loaded", "a: it is old", "b: it is old"]


def test_an_older_lm_studio_is_read_by_v0(report: Report, simulator: Simulator, address: Address) -> None:
    """The API's version is shown."""
    simulator.api = "v0"
    _, found = report(config(deployment(params=at(address))))
    [row] = found["deployments"]
    assert (row["api"], row["window_source"], row["window_tokens"]) == ("v0", "api/v0", 8192)


@pytest.mark.slow
def test_a_wildcard_shows_every_loaded_model(report: Report, simulator: Simulator, address: Address) -> None:
    """One row for each model that is loaded, with its own window."""
    simulator.load(GPT_OSS, 16_384)
    code, found = report(config(deployment("lm_studio/*", "lm_studio/*", params=at(address))))
    assert code == 0
    rows = [(row["model"], row["window_tokens"], row["tokenizer_exact"]) for row in found["deployments"]]
    assert rows == [(QWEN, 8192, True), (GPT_OSS, 16_384, True)]


def test_an_lm_studio_without_models_is_a_problem(report: Report) -> None:
    """No request can load one."""
    with serve(Simulator([])) as empty:
        code, found = report(config(deployment("lm_studio/*", params=at(empty))))
    assert code == 1
    assert messages(found) == ["LM Studio has no chat model: download one (`lms get`)."]


def test_a_model_that_is_not_loaded_is_a_note(report: Report, address: Address) -> None:
    """The first request loads it, so nothing has to be changed."""
    code, found = report(config(deployment(f"lm_studio/{GPT_OSS}", params=at(address))))
    assert code == 0
    assert found["deployments"][0]["loaded"] is False
    assert any("is not loaded" in message for message in messages(found, "note"))


def test_a_model_that_is_not_loaded_is_a_problem_where_requests_are_refused(report: Report, address: Address) -> None:
    """With `when_not_loaded: error` somebody has to load it."""
    entry = deployment(f"lm_studio/{GPT_OSS}", params=at(address))
    code, found = report(config(entry, settings={"when_not_loaded": "error"}))
    assert code == 1
    assert "load it in LM Studio" in messages(found)[0]


def test_a_misspelt_model_gets_a_suggestion(report: Report, address: Address) -> None:
    """The closest names that LM Studio has."""
    code, found = report(config(deployment("lm_studio/qwen/qwen-3-8b", params=at(address))))
    assert code == 1
    assert f"LM Studio has {QWEN}" in messages(found)[0]


def test_a_server_that_is_not_there_is_a_problem(report: Report) -> None:
    """Reachable: no; and what to do."""
    code, found = report(config(deployment(params={"api_base": "http://127.0.0.1:1/v1"})))
    assert code == 1
    [row] = found["deployments"]
    assert (row["reachable"], row["guarded"]) == (False, None)
    assert "start LM Studio's server" in messages(found)[0]


def test_a_missing_v1_is_a_problem(report: Report, address: Address) -> None:
    """LM Studio answers 200 on unknown paths, so this is hard to find otherwise."""
    code, found = report(config(deployment(params={"api_base": address.base_url})))
    assert code == 1
    assert messages(found) == [
        f"api_base is {address.base_url}, but requests go below /v1: write {address.base_url}/v1."
    ]


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


def test_a_local_openai_server_is_asked_whether_it_is_lm_studio(report: Report, address: Address) -> None:
    """`openai/` with a loopback address that answers as LM Studio is guarded."""
    code, found = report(config(deployment(f"openai/{QWEN}", params=at(address))))
    assert code == 0
    [row] = found["deployments"]
    assert (row["guarded"], row["why"]) == (True, "its server answers as LM Studio")


def test_another_local_server_is_left_alone(report: Report, simulator: Simulator, address: Address) -> None:
    """It speaks OpenAI's API only, so it is not LM Studio, and not guarded."""
    simulator.api = "openai"
    _, found = report(config(deployment(f"openai/{QWEN}", params=at(address))))
    assert found["deployments"][0]["guarded"] is False
    assert found["deployments"][0]["why"] == "its server is not LM Studio"


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


def test_an_opted_in_provider_is_guarded_with_the_operators_window(report: Report) -> None:
    """Its window is the number that was written down."""
    info = {"compaction": {"enabled": True, "context_length": 200_000}}
    code, found = report(config(deployment("openai/gpt-5", info=info)))
    assert code == 0
    [row] = found["deployments"]
    assert (row["guarded"], row["window_tokens"], row["window_source"]) == (True, 200_000, "operator")


def test_an_opted_in_server_says_its_window(
    report: Report, plain: PlainServer, write: Callable[..., Path], environ: dict[str, str], capsys: Any
) -> None:
    """llama.cpp's server behind an openai/ deployment: its own number, and what its slots may mean."""
    plain.gets["/props"] = {"default_generation_settings": {"n_ctx": 6144}, "total_slots": 4}
    info = {"compaction": {"enabled": True, "context_length": 4096}}
    document = config(deployment("openai/qwen3", params={"api_base": f"{plain.base_url}/v1"}, info=info))
    code, found = report(document)
    assert code == 0
    [row] = found["deployments"]
    assert (row["guarded"], row["reachable"], row["api"]) == (True, True, "llama.cpp")
    assert (row["window_tokens"], row["window_source"]) == (6144, "llama.cpp")
    assert any("`admission: pool`" in message for message in messages(found, "note"))
    doctor(config=write(document), as_json=False, environ=environ)
    assert "window   6,144 tokens, from llama.cpp's /props" in capsys.readouterr().out


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


def test_a_hosted_model_that_nobody_knows_is_a_note(report: Report) -> None:
    """What is assumed, and what to write."""
    code, found = report(config(deployment("openrouter/x", info={"compaction": {"enabled": True}})))
    assert code == 0
    [row] = found["deployments"]
    assert (row["window_tokens"], row["window_source"]) == (128_000, "default")
    said = " ".join(messages(found, "note"))
    assert "assumed to be 128,000 tokens: write model_info.compaction.context_length" in said


def test_a_model_that_ollama_has_not_loaded_is_a_note(report: Report, plain: PlainServer) -> None:
    """Its window is known after the first request; until then the next source counts."""
    plain.gets["/api/ps"] = {"models": []}
    info = {"compaction": {"enabled": True, "context_length": 4096}}
    params = {"api_base": plain.base_url}
    _, found = report(config(deployment("ollama_chat/qwen3", params=params, info=info)))
    assert found["deployments"][0]["window_source"] == "operator"
    assert any("Ollama has not loaded qwen3, so 4,096 tokens" in message for message in messages(found, "note"))
    code, found = report(config(deployment("ollama_chat/x", params=params, info={"compaction": {"enabled": True}})))
    assert (code, found["deployments"][0]["loaded"]) == (0, False)
    assert any("Ollama has not loaded x, so its window is not known; the first" in m for m in messages(found, "note"))
    plain.gets["/api/ps"] = {"models": [{"name": "qwen3:latest", "context_length": 16384}]}
    _, found = report(config(deployment("ollama_chat/*", params=params, info=info)))
    [row] = found["deployments"]
    assert (row["model"], row["window_tokens"], row["window_source"]) == ("qwen3:latest", 16384, "ollama")


def test_an_opted_in_server_that_is_not_there_is_a_problem(report: Report) -> None:
    """As with LM Studio; the window that counts until then is shown."""
    info = {"compaction": {"enabled": True, "context_length": 4096}}
    code, found = report(config(deployment("llamafile/x", params={"api_base": "http://127.0.0.1:1/v1"}, info=info)))
    assert code == 1
    assert (found["deployments"][0]["reachable"], found["deployments"][0]["window_tokens"]) == (False, 4096)
    assert "start the server, or correct api_base" in messages(found)[0]


def test_the_model_map_is_named_as_a_source(report: Report) -> None:
    """What LiteLLM knows of a hosted model; nobody is asked."""
    code, found = report(config(deployment("openai/gpt-4o", info={"compaction": {"enabled": True}})))
    assert code == 0
    [row] = found["deployments"]
    assert (row["window_tokens"], row["window_source"], row["server"]) == (128_000, "model_map", "")


def test_a_config_that_guards_nothing_is_a_problem(report: Report) -> None:
    """Probably not what its author wanted."""
    code, found = report(config(deployment("openai/gpt-5")))
    assert code == 1
    assert "no deployment is guarded" in messages(found)[0]


def test_the_variable_decides_where_the_config_says_so(report: Report, address: Address) -> None:
    """os.environ/LM_STUDIO_API_BASE is resolved as LiteLLM does it."""
    document = config(deployment(params={"api_base": "os.environ/LM_STUDIO_API_BASE"}))
    code, found = report(document, LM_STUDIO_API_BASE=f"{address.base_url}/v1")
    assert code == 0
    assert found["deployments"][0]["window_tokens"] == 8192


def test_credentials_in_an_address_are_not_shown(report: Report, simulator: Simulator, address: Address) -> None:
    """A report is pasted into bug reports."""
    with_password = address.base_url.replace("http://", "http://me:secret@")
    _, found = report(config(deployment(params={"api_base": f"{with_password}/v1"})))
    assert "secret" not in json.dumps(found)
    simulator.script = lambda call: Reply(status=500, raw_body={"error": "broken"})
    _, found = report(config(deployment(params={"api_base": f"{with_password}/v1"})), probes=True)
    assert any("the probe failed: http://127.0.0.1" in message for message in messages(found))
    assert "secret" not in json.dumps(found)


def test_a_bypassed_carrier_is_a_problem(report: Report, address: Address, environ: dict[str, str]) -> None:
    """LiteLLM's experimental handler ignores the client that carries answers over the limit: say so."""
    environ["EXPERIMENTAL_OPENAI_BASE_LLM_HTTP_HANDLER"] = "true"
    code, found = report(config(deployment(params=at(address))))
    assert code == 1
    assert found["deployments"][0]["carrier"] == "hooks"
    assert any("ignores the client" in message for message in messages(found, "problem"))


def test_ways_are_those_of_the_carrier(report: Report, address: Address) -> None:
    """LiteLLM's hooks know chats only, so that nothing is sent as a rendered prompt."""
    _, found = report(config(deployment(params=at(address)), settings={"carrier": "hooks"}))
    [row] = found["deployments"]
    assert (row["carrier"], row["ways"]) == ("hooks", ["prefill", "turn"])


def lm_studio_file(folder: Path, model: str = "qwen3-8b") -> Path:
    """A model file with a vocabulary of six tokens, as LM Studio keeps it."""
    path = folder / "qwen" / f"{model}-GGUF" / f"{model}-Q4_K_M.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(gguf(bpe_fields(tokenizer__chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")))
    return path


def test_the_models_own_file_is_named(report: Report, address: Address, tmp_path: Path) -> None:
    """Found by what the server lists, in the folder that the settings name."""
    path = lm_studio_file(tmp_path / "models")
    document = config(deployment(params=at(address)), settings={"models_folder": str(tmp_path / "models")})
    code, found = report(document)
    assert code == 0
    [row] = found["deployments"]
    assert row["tokenizer_source"] == "lm_studio_file"
    assert row["tokenizer_words"] == f"LM Studio's file {path}"
    assert row["template_words"] == "the file's own"


def test_a_damaged_file_is_a_problem(report: Report, address: Address, tmp_path: Path) -> None:
    """It says which file, and what counts meanwhile."""
    path = lm_studio_file(tmp_path / "models")
    path.write_bytes(path.read_bytes()[:100])
    code, found = report(config(deployment(params=at(address)), settings={"models_folder": str(tmp_path / "models")}))
    assert code == 1
    [message] = messages(found)
    assert str(path) in message
    assert found["deployments"][0]["tokenizer_source"] == "pack"


def test_a_damaged_pack_is_a_problem(report: Report, address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this package brings is looked at too: by what is counted instead, and what to do."""
    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.setattr(registry, "_broken", {})
    monkeypatch.setattr(registry, "read_pack", damaged)
    code, found = report(config(deployment(params=at(address))))
    assert code == 1
    assert messages(found) == ["The pack is damaged: reinstall. cl100k_base counts meanwhile."]
    [row] = found["deployments"]
    assert (row["tokenizer"], row["tokenizer_source"], row["tokenizer_exact"]) == ("cl100k_base", "stand_in", False)


def damaged(name: str) -> Any:
    """A pack that cannot be read."""
    raise CompactionError("The pack is damaged: reinstall.")


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


def test_without_the_protocol_the_package_counts(report: Report, simulator: Simulator, address: Address) -> None:
    """Switched off, or not there: nothing is asked, or nothing is wrong."""
    for settings in ({"ask_server": "off"}, {}):
        simulator.sdk.mode = "no_upgrade"
        code, found = report(config(deployment(params=at(address)), settings=settings))
        assert code == 0
        [row] = found["deployments"]
        assert (row["model_settings"], row["template_words"]) == ("", "qwen3, from this package")
        assert len(simulator.sdk.sockets) == (0 if settings else 1)


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


def test_pruning_model_that_would_not_be_asked_is_said(report: Report, address: Address) -> None:
    """Not loaded, without a window, behind a wildcard: the model that is asked writes its own summaries meanwhile."""
    own = {"compaction": {"pruning_model": "small"}}
    everything = deployment("lm_studio/*", "any/*", params=at(address))
    code, found = report(
        config(
            deployment(params=at(address), info=own),
            deployment(f"lm_studio/{GPT_OSS}", "small", params=at(address)),
            everything,
            settings={"pruning_model": f"any/{GPT_OSS}"},
        )
    )
    assert code == 0
    for name in ("small", f"any/{GPT_OSS}"):
        (said,) = [each["message"] for each in found["findings"] if each["place"] == f"pruning_model {name}"]
        assert said.startswith("the model that is asked writes its own summaries: it is not loaded, and loading it")
    asked = {"pruning_model": f"any/{QWEN}"}
    _, found = report(config(deployment(params=at(address)), everything, settings=asked))
    assert [each for each in found["findings"] if "pruning_model" in each["place"]] == []
    # A name of its own goes before a wildcard, as in LiteLLM's router.
    named = deployment(f"lm_studio/{GPT_OSS}", f"any/{QWEN}", params=at(address))
    _, found = report(config(deployment(params=at(address)), everything, named, settings=asked))
    assert len([each for each in found["findings"] if "pruning_model" in each["place"]]) == 1


def test_a_pruning_model_that_is_not_guarded_is_looked_at_too(
    report: Report, address: Address, plain: PlainServer
) -> None:
    """Its window decides, opted in or not, and under an alias as well; a hosted model has one."""
    document = config(
        deployment(params=at(address)),
        deployment("openai/x", "writer", params={"api_base": f"{plain.base_url}/v1"}),
        deployment("openai/gpt-4o", "hosted"),
        settings={"pruning_model": "alias"},
        router_settings={"model_group_alias": {"alias": "writer"}},
    )
    _, found = report(document)
    (said,) = [each["message"] for each in found["findings"] if each["place"] == "pruning_model alias"]
    assert "its context length is unknown" in said
    document["router_settings"]["model_group_alias"]["alias"] = "hosted"
    _, found = report(document)
    assert [each for each in found["findings"] if "pruning_model" in each["place"]] == []


@pytest.mark.parametrize("place", ["global", "deployment"])
def test_unknown_pruning_model_is_a_problem(report: Report, address: Address, place: str) -> None:
    """The proxy would refuse to start with it."""
    wrong = {"pruning_model": "nobody"}
    info = {"info": {"compaction": wrong}} if place == "deployment" else {}
    code, found = report(config(deployment(params=at(address), **info), settings=wrong if place == "global" else None))
    assert code != 0
    (message,) = messages(found)
    assert message.startswith("no model of this proxy is called 'nobody'; known: local")


def test_a_model_whose_summaries_say_nothing_is_named(report: Report, address: Address, tmp_path: Path) -> None:
    """From the history that the proxies have kept."""
    url = f"sqlite:///{tmp_path / 'store.sqlite3'}"

    async def keep() -> None:
        store = open_store(url, ttl_s=3600.0, max_bytes=1 << 20)
        for number in range(6):
            row = event("fallback", pruning_model="tiny", reason="loop")
            await store.add_event(time.time() + number, event_to_json(row))
        await store.aclose()

    asyncio.run(keep())
    code, found = report(config(deployment(params=at(address)), settings={"store": url}))
    assert code == 0
    [said] = [each for each in messages(found, "note") if each.startswith("tiny:")]
    assert "6 of 6" in said
    assert "max_summary_calls: 0" in said


def test_a_forgotten_prefix_is_advised(report: Report, address: Address) -> None:
    """LM Studio is at the address, and lists a model of that very name; others are left alone."""
    code, found = report(config(deployment(QWEN, params={"api_base": f"{address.base_url}/v1"})))
    assert code == 1
    assert f"LM Studio at its api_base has this model: write `model: lm_studio/{QWEN}`." in messages(found)
    _, found = report(config(deployment("qwen/other", params={"api_base": f"{address.base_url}/v1"})))
    assert not any("write `model" in said for said in messages(found))


def test_it_looks_at_the_server_of_the_up_that_runs(report: Report, address: Address, environ: dict[str, str]) -> None:
    """And says so; a proxy that has ended is none."""
    path = Path(environ["LITELLM_COMPACTION_HOME"]) / RUNNING_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    note = {"pid": os.getpid(), "base_url": "http://127.0.0.1:4000", "api_base": f"{address.base_url}/v1"}
    path.write_text(json.dumps({**note, "is_simulated": True}), encoding="utf-8")
    document = config(deployment("lm_studio/*", "lm_studio/*", params={"api_base": "os.environ/LM_STUDIO_API_BASE"}))
    code, found = report(document)
    assert code == 0
    said = f"it runs at http://127.0.0.1:4000: looked at is its simulator, not an LM Studio, at {address.base_url}/v1."
    assert said in messages(found, "note")


async def test_settings_that_were_changed_on_the_page_are_named(
    report: Report, address: Address, tmp_path: Path
) -> None:
    """They hold in place of config.yaml's."""
    url = f"sqlite:///{tmp_path}/store.db"
    store = open_store(url, ttl_s=100, max_bytes=1_000_000)
    overlay = Overlay().changed(Settings(), {"pre_request_ratio": 0.75}, when_s=1.0, role="admin")
    await store.put_setting(CHANGED_SETTINGS, f"{overlay.to_json()}\nsigned")
    await store.aclose()
    document = config(deployment(params={"api_base": f"{address.base_url}/v1"}), settings={"store": url})
    _, found = await asyncio.to_thread(report, document)
    assert "changed on the settings page, in place of config.yaml's values: pre_request_ratio: 0.75." in messages(
        found, "note"
    )
