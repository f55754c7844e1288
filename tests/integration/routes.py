"""A proxy with many kinds of deployments, fallbacks and an alias, and the servers that are not LM Studio behind it.

Several files ask it: which deployments are guarded, by whose window, and who pays for what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.integration.bench import AUTH, KEY, Bench, Group, open_bench
from tests.integration.harness import entry
from tests.integration.plain_server import PlainServer, serve_plain
from tests.integration.rows import Rows

TOKEN = "sk-lm-AbCdEfGh:0123456789abcdefghij"
_GROUPS = [
    Group("lms"),
    Group("openai-lms", provider="openai"),
    Group("pair-4k", 4096),
    Group("pair-16k", 16384),
    Group("mixed-lms", 4096),
    Group("tight", 4096),
    Group("failing-lms"),
    Group("retried"),
    Group("cold", None),
    Group("token", params={"api_key": TOKEN}, simulator={"api_token": TOKEN}),
    Group("v0", simulator={"api": "v0"}),
    Group("pruner-cold", None),
    Group("pruned-cold", compaction={"pruning_model": "pruner-cold"}),
    Group("pruned-silent", compaction={"pruning_model": "plain"}),
    Group("pruned-llama", compaction={"pruning_model": "scribe"}),
    Group("pruned-written", compaction={"pruning_model": "written"}),
    Group("wild", 8192),
    # Of those who look at who pays.
    Group("local"),
    Group("warmed", None),
]
HAS_PROMETHEUS = find_spec("prometheus_client") is not None
_PROPS = {"default_generation_settings": {"id": 0, "n_ctx": 6144}, "total_slots": 1, "chat_template": "…"}


@dataclass(frozen=True)
class Servers:
    """Those that are not LM Studio: one of no kind, llama.cpp's, one of it that is a pruning model only."""

    plain: PlainServer
    llama: PlainServer
    scribe: PlainServer


@contextmanager
def serve_others() -> Iterator[Servers]:
    """The servers while the block lasts."""
    with ExitStack() as stack:
        plain, llama, scribe = (stack.enter_context(serve_plain()) for _ in range(3))
        llama.gets["/props"] = scribe.gets["/props"] = _PROPS
        yield Servers(plain, llama, scribe)


@contextmanager
def open_routes(folder: Path, servers: Servers, rows: Rows) -> Iterator[Bench]:
    """The proxy, with keys of several users and teams, a callback that writes rows, and LiteLLM's metrics."""
    own = f"{servers.plain.base_url}/v1"

    on = {"enabled": True}
    llama = f"{servers.llama.base_url}/v1"
    opted_in = [
        entry("llama", "openai/qwen", llama, compaction=on),
        entry("llamafile", "llamafile/qwen", llama, compaction=on),
        entry("metered", "openai/qwen", llama, compaction=on),
        entry("scribe", "openai/qwen", f"{servers.scribe.base_url}/v1"),
    ]

    def entries(urls: Mapping[str, str]) -> list[dict[str, Any]]:
        return [
            entry("plain", "openai/plain", own),
            entry("written", "openai/gpt-4o-mini", own, max_input_tokens=128_000),
            entry("pair", f"lm_studio/{KEY}", f"{urls['pair-4k']}/v1", id="pair-small"),
            entry("pair", f"lm_studio/{KEY}", f"{urls['pair-16k']}/v1", id="pair-large"),
            entry("mixed", f"lm_studio/{KEY}", f"{urls['mixed-lms']}/v1", id="mixed-guarded"),
            entry("mixed", "openai/mixed", own, id="mixed-plain"),
            entry("to-guarded", "openai/to-guarded", own),
            entry("lm_studio/*", "lm_studio/*", f"{urls['wild']}/v1"),
            *opted_in,
        ]

    with open_bench(
        folder,
        _GROUPS,
        {"window_cache_s": 0.2},
        make_entries=entries,
        environ=rows.environ,
        litellm_settings={"callbacks": ["recorder.handler", *(["prometheus"] if HAS_PROMETHEUS else [])]},
        general_settings=AUTH,
        router_settings={
            "num_retries": 0,
            "disable_cooldowns": True,
            "fallbacks": [{"to-guarded": ["pair-4k"]}, {"failing-lms": ["plain"]}],
            "context_window_fallbacks": [{"tight": ["plain"]}],
        },
    ) as bench:
        yield bench
