"""The clients of the matrix: where each comes from, how one prompt is run headless, how the model calls its tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from tests.clients.model import Name, Tongue


def _json(**arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


# The tools of the drivers in tests/clients/drivers.
PLAIN = Tongue(
    lambda path: ("read_file", _json(path=path.name)),
    lambda path, content: ("write_file", _json(path=path.name, content=content)),
)
_NO_COMMAND = "no compaction of its own"


@dataclass(frozen=True)
class Client:
    """One client.

    Attributes:
        name: of its folder and its row.
        packages: what is installed, `pip:…` or `npm:…`; the first one's version is shown.
        command: one headless run; `{driver}` is the program in drivers/, `{prompt}` the prompt, which is sent to the
            standard input where it does not stand here.
        connect: of `litellm-compaction connect`, whose lines configure it.
        tongue: how the model calls its tools.
        folder: of its installation, where several rows share one.
        environ: what a headless run needs beside the lines of `connect`.
        window: tokens of the model that it is given.
        most_answer_tokens: its own bound of an answer.
        asks_for_summary: a pattern of its own request for a summary.
        own: the command for its own compaction, after a first run.
        without: why a scenario does not apply.
        is_sdk: a library with a driver of ours.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    command: tuple[str, ...]
    connect: str
    _: KW_ONLY
    tongue: Tongue = PLAIN
    folder: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    window: int = 8192
    most_answer_tokens: int | None = None
    asks_for_summary: str = ""
    own: tuple[str, ...] = ()
    without: Mapping[Name, str] = field(default_factory=dict)
    is_sdk: bool = False


def _sdk(name: str, title: str, *packages: str, connect: str, folder: str = "", **more: Any) -> Client:
    is_python = packages[0].startswith("pip:")
    environ = more.pop("environ", {})
    return Client(
        name,
        title,
        packages,
        ("python" if is_python else "node", "{driver}"),
        connect,
        folder=folder or name,
        environ=environ,
        without={"own": _NO_COMMAND, **more.pop("without", {})},
        is_sdk=True,
        **more,
    )


CLIENTS: tuple[Client, ...] = (
    _sdk("openai-python-chat", "openai (Python), chat", "pip:openai", connect="openai-python", folder="openai-python"),
    _sdk(
        "openai-python-responses",
        "openai (Python), responses",
        "pip:openai",
        connect="openai-python",
        folder="openai-python",
    ),
    _sdk("openai-node-chat", "openai (Node), chat", "npm:openai", connect="openai-node", folder="openai-node"),
    _sdk(
        "openai-node-responses", "openai (Node), responses", "npm:openai", connect="openai-node", folder="openai-node"
    ),
    _sdk("anthropic-python", "anthropic (Python)", "pip:anthropic", connect="claude", most_answer_tokens=7000),
    _sdk("anthropic-node", "anthropic (Node)", "npm:@anthropic-ai/sdk", connect="claude", most_answer_tokens=7000),
    _sdk("litellm", "litellm (SDK)", "pip:litellm", connect="openai-python"),
    _sdk(
        "langchain",
        "LangChain, LangGraph (create_agent)",
        "pip:langchain",
        "pip:langchain-openai",
        "pip:langgraph",
        connect="langchain",
    ),
    _sdk(
        "openai-agents-chat",
        "openai-agents, chat",
        "pip:openai-agents",
        connect="openai-python",
        folder="openai-agents",
        environ={"OPENAI_AGENTS_API": "chat_completions"},
    ),
    _sdk(
        "openai-agents-responses",
        "openai-agents, responses",
        "pip:openai-agents",
        connect="openai-python",
        folder="openai-agents",
        environ={"OPENAI_AGENTS_API": "responses"},
    ),
    _sdk("pydantic-ai", "pydantic-ai (run_stream)", "pip:pydantic-ai-slim[openai]", connect="openai-python"),
    _sdk(
        "llama-index",
        "LlamaIndex (FunctionAgent)",
        "pip:llama-index-core",
        "pip:llama-index-llms-openai-like",
        connect="openai-python",
    ),
    _sdk("vercel", "Vercel AI SDK", "npm:ai", "npm:@ai-sdk/openai-compatible", "npm:zod", connect="vercel"),
)


def driver_of(client: Client) -> Path:
    """The program that runs a library; rows that share an installation share it, too."""
    suffix = "py" if client.command[0] == "python" else "mjs"
    return Path(__file__).parent / "drivers" / f"run_{client.folder.replace('-', '_')}.{suffix}"
