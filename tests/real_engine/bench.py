"""A real proxy in front of real engines behind LM Studio's listings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.harness import Proxy, lm_studio, proxy, write_config
from tests.real_engine.engine import Engine
from tests.real_engine.shim import Shim, serve
from tests.real_engine.weights import write_tokenizer

# Whether four answers of 350 tokens share a context of 4,096, in place of 60 in 512: that takes minutes.
IS_LONG = bool(os.environ.get("TESTS_LONG_ANSWERS"))
# Window and slots of each engine, by the name of its model. llama.cpp rounds windows up to 256.
ENGINES = {"talk": (2048, 1), "small": (512, 1), "pool": (4096 if IS_LONG else 512, 4)}
# The engine `pool` once more, as what it is: a llama.cpp that nobody has told us of its slots.
LLAMA_CPP = "pool by llama.cpp"


@dataclass
class Bench:
    """A proxy, the shim that it takes for LM Studio, and the engines behind it."""

    proxy: Proxy
    shim: Shim
    engines: dict[str, Engine]
    tokenizer: Path


@contextmanager
def open_bench(folder: Path, weights: Path) -> Iterator[Bench]:
    """A bench with all engines.

    The model writes its summaries worse than none (facts of 2026-11: 29 of 29 degenerate), and each would take minutes
    here, so that compactions are made without a model.
    """
    tokenizer = write_tokenizer(folder)
    settings = {"tokenizer": str(tokenizer), "max_summary_calls": 0, "answer_min_tokens": 48}
    engines = {name: Engine(weights, window, slots) for name, (window, slots) in ENGINES.items()}
    with ExitStack() as stack:
        for engine in engines.values():
            stack.callback(engine.kill)
        with ThreadPoolExecutor() as threads:
            list(threads.map(Engine.start, engines.values()))
        shim = stack.enter_context(serve(engines))
        models = [lm_studio(name, name, shim.base_url) for name in engines]
        own = {"model": "openai/pool", "api_base": f"{shim.base_url}/llama.cpp/pool/v1", "api_key": "none"}
        opted_in = {"compaction": {"enabled": True}}
        models.append({"model_name": LLAMA_CPP, "litellm_params": own, "model_info": opted_in})
        router = {"num_retries": 0, "disable_cooldowns": True}
        config = write_config(folder, models, settings, router_settings=router)
        yield Bench(stack.enter_context(proxy(config)), shim, engines, tokenizer)
