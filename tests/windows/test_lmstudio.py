"""LM Studio's API: shapes, failures, and which instance a name reaches."""

from __future__ import annotations

import threading

import httpx
import pytest

from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.windows import lmstudio
from litellm_compaction.windows.lmstudio import (
    Instance,
    Listing,
    WantedModel,
    answers_as_lmstudio,
    list_models,
    match,
    server_root,
)
from tests.windows.fake_lmstudio import BASE, FakeLMStudio, v0_model, v1_model


@pytest.mark.parametrize(
    "api_base", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1//v1//", " http://h:1/v1 "]
)
def test_the_root_has_no_version_and_no_slash(api_base: str) -> None:
    """Every spelling of an api_base leads to the same root."""
    assert server_root(api_base) == "http://h:1"


async def test_v1_is_read_with_its_instances(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """A v1 listing gives every instance with the context length with which it is loaded."""
    server.list_v1(v1_model("qwen/qwen3-8b", _=8192, big=32768), v1_model("a/b"))
    listing = await list_models(http, BASE, None)
    assert listing.api == "v1"
    loaded, idle = listing.models
    assert loaded.instances == (
        Instance(id="qwen/qwen3-8b", context_length=8192, parallel=4),
        Instance(id="big", context_length=32768, parallel=4),
    )
    assert (loaded.kind, loaded.architecture, loaded.publisher) == ("llm", "qwen3", "qwen")
    assert loaded.loaded
    assert not idle.loaded
    assert server.paths == ["/api/v1/models"]


async def test_v0_is_asked_when_v1_answers_200_with_an_error(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """LM Studio before 0.4 answers 200 with an error body on v1, and that is no listing."""
    server.list_v0(v0_model("one", tokens=4096), v0_model("two", tokens=None, state="not-loaded"))
    listing = await list_models(http, BASE, None)
    assert listing.api == "v0"
    assert listing.models[0].instances == (Instance(id="one", context_length=4096, parallel=1),)
    assert listing.models[1].instances == ()


@pytest.mark.parametrize(("models", "holds_up"), [(200, True), (201, False)])
async def test_a_long_listing_is_read_beside_the_event_loop(
    server: FakeLMStudio, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, models: int, holds_up: bool
) -> None:
    """One of thousands of models would keep all other answers waiting; a short one is not worth a thread."""
    threads: list[int] = []
    parse = lmstudio._parse_v1

    def noting(answer: object) -> Listing:
        threads.append(threading.get_ident())
        return parse(answer)

    monkeypatch.setattr(lmstudio, "_parse_v1", noting)
    server.list_v1(*(v1_model(f"a/{number}") for number in range(models)))
    assert len((await list_models(http, BASE, None)).models) == models
    assert (threads == [threading.get_ident()]) is holds_up


async def test_missing_optional_fields_are_accepted(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """Only key and loaded_instances are needed; nulls, odd types and unknown fields do not hurt."""
    server.list_v1(
        {"key": "bare", "loaded_instances": None, "architecture": None, "variants": None, "new": {"x": 1}},
        {"key": "odd", "loaded_instances": [{"id": "odd", "config": {"context_length": "many"}}], "variants": [3]},
        {"type": "embedding", "key": "embed", "loaded_instances": [{"id": "embed"}]},
        {"key": 7, "loaded_instances": []},
    )
    listing = await list_models(http, BASE, None)
    assert [listed.key for listed in listing.models] == ["bare", "odd", "embed"]
    assert listing.models[1].instances == (Instance(id="odd", context_length=None, parallel=1),)
    assert listing.models[2].kind == "embedding"


@pytest.mark.parametrize(
    "answer",
    [
        {"error": "Unexpected endpoint"},
        {"models": [{"name": "llama3", "size": 3}]},
        [],
        None,
        "text",
        httpx.Response(200, text="<html>"),
        httpx.Response(404, json={"models": []}),
        httpx.Response(302, headers={"location": "/login"}),
        httpx.Response(200, content=b'{"models": [' + b" " * (4 * 1024 * 1024) + b"]}"),
        httpx.Response(200, text="[" * 100_000),
    ],
)
async def test_another_api_is_refused(server: FakeLMStudio, http: httpx.AsyncClient, answer: object) -> None:
    """Whatever is not LM Studio's shape, or too large, is named as another API."""
    server.answers = {"/api/v1/models": answer, "/api/v0/models": {"data": [{"id": "m", "object": "model"}]}}
    with pytest.raises(ServerUnavailable, match="not LM Studio's API"):
        await list_models(http, BASE, None)


async def test_v0_may_answer_where_v1_refuses_the_key(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """A token without permission for v1 still gets the window from v0."""
    server.answers["/api/v1/models"] = httpx.Response(403)
    server.list_v0(v0_model())
    assert (await list_models(http, BASE, "sk-lm-1")).api == "v0"


async def test_the_greeting_identifies_lmstudio(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """One request is enough where LM Studio greets."""
    server.answers["/lmstudio-greeting"] = {"lmstudio": True}
    assert await answers_as_lmstudio(http, BASE, None)
    assert server.paths == ["/lmstudio-greeting"]


async def test_a_listing_identifies_lmstudio_too(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """A valid listing with models is proof; an empty one is not, since other servers answer so too."""
    server.list_v1()
    assert not await answers_as_lmstudio(http, BASE, None)
    server.list_v1(v1_model())
    assert await answers_as_lmstudio(http, BASE, None)


async def test_no_is_not_unknown(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """Another server is a no; a dead one raises."""
    server.answers["/lmstudio-greeting"] = httpx.Response(401)
    assert not await answers_as_lmstudio(http, BASE, None)
    server.answers["/lmstudio-greeting"] = httpx.Response(502)
    with pytest.raises(ServerUnavailable):
        await answers_as_lmstudio(http, BASE, None)


async def _listing(server: FakeLMStudio, http: httpx.AsyncClient, *models: dict[str, object]) -> Listing:
    server.list_v1(*models)
    return await list_models(http, BASE, None)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("mine", ("qwen/qwen3-8b", "mine")),
        ("qwen/qwen3-8b", ("qwen/qwen3-8b", "small")),
        ("qwen/qwen3-8b@q4_k_m", ("qwen/qwen3-8b", "small")),
        ("qwen/qwen3-8b@q8_0", ("qwen/qwen3-8b", "small")),
        ("qwen3-8b", ("qwen/qwen3-8b", "small")),
        ("other/qwen3-8b@q2", ("qwen/qwen3-8b", "small")),
        ("QWEN/Qwen3-8B", ("qwen/qwen3-8b", "small")),
        ("Mine", ("qwen/qwen3-8b", "mine")),
        ("idle", ("x/idle", None)),
        ("qwen", None),
        ("", None),
    ],
)
async def test_names_reach_models_in_order(
    server: FakeLMStudio, http: httpx.AsyncClient, model: str, expected: tuple[str, str | None] | None
) -> None:
    """Instance id, key, variant, without quantisation, without publisher, without case; else the smallest instance."""
    listing = await _listing(
        server, http, v1_model("x/idle"), v1_model("qwen/qwen3-8b", mine=32768, silent=None, small=4096)
    )
    found = match(listing, model)
    assert (found and (found[0].key, found[1].id if found[1] else None)) == expected


async def test_an_exact_id_wins_over_a_smaller_instance(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """A key that is also an instance id reaches that instance, however small the others are."""
    listing = await _listing(server, http, v1_model("q/q", _=16384, other=4096))
    found = match(listing, "q/q")
    assert found is not None
    assert found[1] == Instance(id="q/q", context_length=16384, parallel=4)


async def test_a_loaded_namesake_wins(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """A bare name that two publishers share reaches the one that is loaded."""
    listing = await _listing(server, http, v1_model("a/m"), v1_model("b/m", _=8192))
    found = match(listing, "m")
    assert found is not None
    assert found[0].key == "b/m"


async def test_a_listing_says_what_finds_the_models_file(http: httpx.AsyncClient, server: FakeLMStudio) -> None:
    """Publisher, variant, quantization and format are carried along, from either version of the API."""
    server.list_v1(v1_model("qwen/qwen3-8b") | {"format": "gguf"})
    [listed] = (await list_models(http, BASE, None)).models
    assert listed.wanted == WantedModel(
        key="qwen/qwen3-8b",
        publisher="qwen",
        variant="qwen/qwen3-8b@q4_k_m",
        quantization="Q4_K_M",
        file_format="gguf",
    )
    server.answers.clear()
    server.list_v0(v0_model() | {"publisher": "qwen", "compatibility_type": "mlx", "quantization": "4bit"})
    [older] = (await list_models(http, BASE, None)).models
    assert older.wanted == WantedModel(key="qwen3-8b", publisher="qwen", quantization="4bit", file_format="mlx")


@pytest.mark.parametrize("odd", [None, 7, {"bits": 4}, ["Q4_K_M"]])
async def test_odd_file_fields_say_nothing(http: httpx.AsyncClient, server: FakeLMStudio, odd: object) -> None:
    """A field of another shape never hides a model."""
    server.list_v1(v1_model("a/b") | {"quantization": odd, "format": odd, "selected_variant": odd})
    [listed] = (await list_models(http, BASE, None)).models
    assert listed.wanted == WantedModel(key="a/b", publisher="a")
