"""What clients find in the proxy's lists of models: those that LM Studio lists, with the window that each has now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import yaml

from tests.constants import written_beside
from tests.integration.app import proxy, serve
from tests.integration.harness import MASTER_KEY, Proxy, free_port, lm_studio, until
from tests.lmstudio_double import Address, Model, Simulator

SHIPPED = Path(__file__).parents[2] / "config.yaml"
QWEN, QUANT, COLD = "qwen/qwen3-8b", "google/gemma-3-4b@q4_k_m", "qwen/qwen3-4b"
CACHE_S = 0.5
_WINDOWS = {QWEN: 8192, QUANT: 4096, COLD: None}


def _simulator() -> Simulator:
    embedding = Model("text-embedding-nomic", type="embeddings")
    return Simulator(models=[Model(QWEN), Model(QUANT), Model(COLD), embedding])


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A proxy with the shipped configuration and more wildcards, in front of two LM Studios."""
    folder = tmp_path_factory.mktemp("discovery")
    with ExitStack() as stack:
        first, second = _simulator(), _simulator()
        first.load(QWEN, 8192)
        first.load(QUANT, 4096)
        second.load(QWEN, 16384)
        bases: list[Address] = [stack.enter_context(serve(each)) for each in (first, second)]
        config = yaml.safe_load(SHIPPED.read_text())
        written_beside(folder, {"window_cache_s": CACHE_S})
        config["model_list"] += [
            lm_studio("local/*", "*", bases[0].base_url),
            lm_studio("box/*", "*", bases[1].base_url),
            lm_studio("named", QWEN, bases[0].base_url),
            lm_studio("dead/*", "*", f"http://127.0.0.1:{free_port()}"),
        ]
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        yield stack.enter_context(proxy(path, LM_STUDIO_API_BASE=f"{bases[0].base_url}/v1"))


def _rows(listing: Proxy, path: str) -> list[dict[str, Any]]:
    answer = listing.client.get(path, headers=listing.headers)
    assert answer.status_code == 200, answer.text
    rows: list[dict[str, Any]] = answer.json()["data"]
    return rows


def _windows(listing: Proxy) -> list[tuple[str, int | None]]:
    return [(row["id"], row.get("max_input_tokens")) for row in _rows(listing, "/v1/models")]


def test_the_official_clients_list_the_models_with_their_windows(listing: Proxy) -> None:
    """OpenAI's and Anthropic's packages: every chat model behind every wildcard, nothing of a server that is off."""
    expected = {
        "named": 8192,
        **{f"{prefix}/{key}": window for prefix in ("lm_studio", "local") for key, window in _WINDOWS.items()},
        **{f"box/{key}": 16384 if key == QWEN else None for key in _WINDOWS},
    }
    assert listing.expect_logged(rf"guarding {QWEN} \(8,192 tokens\), .*, {QWEN} \(16,384 tokens\) and 2 more")
    # On a busy machine the first list is not waited for.
    until(lambda: (f"box/{QWEN}", 16384) in _windows(listing))
    # LiteLLM 1.100.5 lists wildcards themselves, too.
    asking = openai.OpenAI(base_url=f"{listing.base_url}/v1", api_key=MASTER_KEY, max_retries=0)
    models = [model for model in asking.models.list() if "*" not in model.id]
    assert {model.id: getattr(model, "max_input_tokens", None) for model in models} == expected
    assert {model.id: getattr(model, "max_output_tokens", None) for model in models}[f"box/{QWEN}"] == 3276
    found = list(anthropic.Anthropic(base_url=listing.base_url, api_key=MASTER_KEY, max_retries=0).models.list())
    assert {model.id: model.max_input_tokens for model in found if "*" not in model.id} == expected
    assert {model.id: model.max_tokens for model in found}[f"box/{QWEN}"] == 3276
    rows = {row["model_name"]: row["model_info"].get("max_input_tokens") for row in _rows(listing, "/model/info")}
    assert {name: window for name, window in rows.items() if "*" not in name} == expected
