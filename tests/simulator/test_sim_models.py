"""Which models the simulator lists, loads, and addresses."""

from __future__ import annotations

import asyncio

import pytest
from sim_bench import KEY, BenchFactory, user

from litellm_compaction.simulator import Model, Simulator
from litellm_compaction.simulator.catalog import Instance
from tests import virtual_time

OTHER = Model("google/gemma-4-12b", publisher="google", architecture="gemma4", type="vlm")


def test_greeting(bench: BenchFactory) -> None:
    """The identity probe is answered as LM Studio answers it."""
    assert bench().get("/lmstudio-greeting") == {"lmstudio": True}


def test_v1_list_tells_the_loaded_window(bench: BenchFactory) -> None:
    """The native list carries the loaded window per instance and the architectural maximum apart from it."""
    first, second = bench(6000, models=[Model(KEY), OTHER]).get("/api/v1/models")["models"]
    assert first["loaded_instances"][0]["id"] == KEY
    assert first["loaded_instances"][0]["config"]["context_length"] == 6000
    assert first["max_context_length"] == 131_072
    assert (first["type"], second["type"]) == ("llm", "llm")
    assert second["loaded_instances"] == []
    assert second["capabilities"]["vision"] is True


def test_v0_list_has_a_loaded_window_only_when_loaded(bench: BenchFactory) -> None:
    """REST v0 shows `loaded_context_length` for loaded models and leaves it out for others."""
    first, second = bench(6000, models=[Model(KEY), OTHER]).get("/api/v0/models")["data"]
    assert (first["state"], first["loaded_context_length"]) == ("loaded", 6000)
    assert (second["state"], second["type"], second["arch"]) == ("not-loaded", "vlm", "gemma4")
    assert "loaded_context_length" not in second


def test_v0_single_model_is_the_bare_object(bench: BenchFactory) -> None:
    """One model's page is its list entry, addressed also without its publisher; an unknown one is a 404."""
    served = bench(6000)
    assert served.get(f"/api/v0/models/{KEY}") == served.get("/api/v0/models")["data"][0]
    assert served.get("/api/v0/models/qwen3-8b")["id"] == KEY
    assert served.client.get("/api/v0/models/nope").status_code == 404


def test_openai_list_knows_no_window(bench: BenchFactory) -> None:
    """The OpenAI list names all downloads with JIT, only loaded ones without, and never a window."""
    served = bench(models=[Model(KEY), OTHER])
    entries = served.get("/v1/models")["data"]
    assert [entry["id"] for entry in entries] == [KEY, OTHER.key]
    assert set(entries[0]) == {"id", "object", "owned_by"}
    served.simulator.jit = False
    assert [entry["id"] for entry in served.get("/v1/models")["data"]] == [KEY]


def test_unknown_paths_answer_200_with_an_error(bench: BenchFactory) -> None:
    """A path LM Studio does not know gives HTTP 200 and an error body."""
    response = bench().client.get("/api/tags")
    assert response.status_code == 200
    assert "Unexpected endpoint" in response.json()["error"]


@pytest.mark.parametrize(("api", "known"), [("v1", 4), ("v0", 3), ("openai", 1)])
def test_older_servers_offer_fewer_paths(bench: BenchFactory, api: str, known: int) -> None:
    """Each API generation offers its own paths and treats newer ones as unknown."""
    served = bench(api=api)
    paths = ["/v1/models", "/lmstudio-greeting", "/api/v0/models", "/api/v1/models"]
    assert ["error" not in served.get(path) for path in paths] == [True] * known + [False] * (4 - known)


def test_token_is_required_where_one_is_set(bench: BenchFactory) -> None:
    """A missing or wrong bearer token gives a 401 with an error object, the right one passes."""
    served = bench(api_token="sk-lm-test")
    assert served.client.get("/api/v1/models").status_code == 401
    assert "message" in served.chat(user("hi"), headers=None).json()["error"]
    served.client.headers["Authorization"] = "Bearer sk-lm-test"
    assert served.chat(user("hi")).status_code == 200
    assert served.last.headers["authorization"] == "Bearer sk-lm-test"


def test_load_and_unload_through_the_api(bench: BenchFactory) -> None:
    """Loading echoes its configuration on request, a second load is `key:2`, and unloading removes it."""
    served = bench(6000)
    load = {"model": KEY, "context_length": 16384, "echo_load_config": True}
    loaded = served.client.post("/api/v1/models/load", json=load).json()
    assert (loaded["instance_id"], loaded["load_config"]["context_length"]) == (f"{KEY}:2", 16384)
    assert "load_config" not in served.client.post("/api/v1/models/load", json={"model": KEY}).json()
    unload = served.client.post("/api/v1/models/unload", json={"instance_id": f"{KEY}:2"})
    assert unload.json() == {"instance_id": f"{KEY}:2"}
    assert [instance.id for instance in served.simulator.instances] == [KEY, f"{KEY}:3"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": KEY, "parallel": 4}, 400),
        ({"model": "nope"}, 404),
        ({"model": KEY, "context_length": "big"}, 400),
        ({"model": KEY, "context_length": 10**9}, 400),
        ({}, 400),
    ],
)
def test_impossible_loads_are_refused(bench: BenchFactory, body: dict[str, object], status: int) -> None:
    """Unknown keys, models, and windows are refused with an error body."""
    response = bench().client.post("/api/v1/models/load", json=body)
    assert (response.status_code, "error" in response.json()) == (status, True)


@pytest.mark.parametrize(
    "name", [KEY, "qwen3-8b", "QWEN/Qwen3-8B", "qwen3-8b@q4_k_m", f"{KEY}@q8_0", "unknown/model", ""]
)
def test_all_forms_of_a_name_reach_the_model(bench: BenchFactory, name: str) -> None:
    """Key, variant, bare, differently cased, unknown, and empty names are served by the loaded model."""
    served = bench()
    assert served.chat(user("hi"), model=name).status_code == 200
    assert served.last.instance_id == KEY


def test_a_key_means_its_first_instance(bench: BenchFactory) -> None:
    """A key goes to the canonical instance although a larger one exists; an instance id goes to its own."""
    served = bench(4096)
    served.simulator.load(KEY, 16384, instance_id="big")
    served.chat(user("hi"))
    assert served.last.context_length == 4096
    served.chat(user("hi"), model="big")
    assert (served.last.instance_id, served.last.context_length) == ("big", 16384)


def test_an_exact_download_goes_before_a_loaded_namesake(bench: BenchFactory) -> None:
    """A key that is downloaded but not loaded is loaded, although another publisher's copy is loaded."""
    served = bench(models=[Model(KEY), Model("other/qwen3-8b")])
    served.chat(user("hi"), model="other/qwen3-8b")
    assert served.last.instance_id == "other/qwen3-8b"


def test_jit_loads_with_the_default_window(bench: BenchFactory) -> None:
    """A request for a model that is not loaded loads it at 4096 tokens; a GET does not."""
    served = bench(None, load_ms=5)
    assert served.get("/api/v1/models")["models"][0]["loaded_instances"] == []
    assert served.chat(user("hi"), ttl=300).status_code == 200
    assert (served.last.context_length, served.simulator.instances[0].ttl_s) == (4096, 300)


def test_jit_evicts_the_other_jit_model_only(bench: BenchFactory) -> None:
    """At most one JIT model stays loaded; what was loaded by hand stays."""
    served = bench(models=[Model(KEY), OTHER, Model("third")])
    served.chat(user("hi"), model=OTHER.key)
    served.chat(user("hi"), model="third")
    assert [instance.id for instance in served.simulator.instances] == [KEY, "third"]


def test_concurrent_jit_requests_load_copies() -> None:
    """As LM Studio does (bt#1751)."""
    simulator = Simulator([Model(KEY)], load_ms=1500)

    async def ask_at_once() -> list[Instance]:
        return await asyncio.gather(*(simulator.resolve(KEY, None) for _ in range(4)))

    # In virtual time all four wait before the first is loaded.
    got = virtual_time.run(ask_at_once())
    assert len(simulator.instances) == len({instance.id for instance in got}) == 4


def test_nothing_loaded_and_no_jit_is_a_404(bench: BenchFactory) -> None:
    """Without JIT and without a loaded model the request is refused as LM Studio does."""
    response = bench(None, jit=False).chat(user("hi"))
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_idle_models_expire(bench: BenchFactory) -> None:
    """A JIT model whose idle time to live has passed is no longer loaded."""
    served = bench(None)
    served.chat(user("hi"), ttl=60)
    served.simulator.instances[0].last_used_s -= 61
    assert served.get("/api/v0/models")["data"][0]["state"] == "not-loaded"


def test_python_load_refuses_the_impossible() -> None:
    """Loading an unknown model, an impossible window, or a taken id raises."""
    simulator = Simulator([Model(KEY, max_context_length=100)])
    with pytest.raises(KeyError):
        simulator.load("nope", 10)
    with pytest.raises(ValueError, match="not within"):
        simulator.load(KEY, 101)
    simulator.load(KEY, 100, instance_id="one")
    with pytest.raises(ValueError, match="taken"):
        simulator.load(KEY, 100, instance_id="one")
