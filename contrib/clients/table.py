"""The clients of the matrix: where each comes from, how one prompt is run headless, how the model calls its tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from contrib.clients.model import Name, Tongue


def _json(**arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


# The tools of the drivers in contrib/clients/drivers.
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
        packages: what is installed, `pip:…` or `npm:…`.
        command: one headless run; `{driver}` is the program in drivers/, `{prompt}` the prompt, which is sent to the
            standard input where it does not stand here.
        connect: of `litellm-compaction connect`, whose lines configure it.
        tongue: how the model calls its tools.
        folder: of its installation and its driver; several rows may share one.
        environ: what a headless run needs beside the lines of `connect`.
        window: tokens of the model that it is given.
        most_answer_tokens: its own bound of an answer.
        asks_for_summary: a pattern of its own request for a summary.
        own: the commands of the scenario of its own compaction: one in which it compacts itself at a threshold, or a
            first run, its own command, and a run that goes on.
        without: why a scenario does not apply.
        is_sdk: a library with a driver of ours.
        has_server: its driver starts a server, too, which Ctrl-C must leave running until the driver has stopped.
    """

    name: str
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
    own: tuple[tuple[str, ...], ...] = ()
    without: Mapping[Name, str] = field(default_factory=dict)
    is_sdk: bool = False
    has_server: bool = False

    @property
    def home(self) -> str:
        return self.folder or self.name


def _sdk(name: str, *packages: str, connect: str, folder: str = "", **more: Any) -> Client:
    is_python = packages[0].startswith("pip:")
    environ = more.pop("environ", {})
    return Client(
        name,
        packages,
        ("python" if is_python else "node", "{driver}"),
        connect,
        folder=folder,
        environ=environ,
        without={"own": _NO_COMMAND, **more.pop("without", {})},
        is_sdk=True,
        **more,
    )


_CLAUDE = ("claude", "-p", "--permission-mode", "acceptEdits", "--allowedTools", "Read,Write")
_CODEX = ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-")
_OPENCODE = ("opencode", "run", "--auto")
_QWEN = ("qwen", "--approval-mode", "yolo")
_CLINE = ("cline", "-P", "openai-compatible", "{prompt}")

_SHELL = Tongue(
    lambda path: ("exec_command", _json(cmd=f"cat {path.name}")),
    lambda path, content: ("exec_command", _json(cmd=f"cat >{path.name} <<'END'\n{content}END")),
)

_OPEN_WEBUI = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "only for this run",
    "ENABLE_OLLAMA_API": "false",
    # Its own embeddings and voices would be loaded from the internet.
    "HF_HUB_OFFLINE": "1",
    "RAG_EMBEDDING_ENGINE": "openai",
    "AUDIO_STT_ENGINE": "openai",
    # The model would take its page's requests for a title, for tags and for questions for turns.
    "ENABLE_TITLE_GENERATION": "false",
    "ENABLE_TAGS_GENERATION": "false",
    "ENABLE_FOLLOW_UP_GENERATION": "false",
}

PROGRAMS: tuple[Client, ...] = (
    Client(
        "codex",
        ("npm:@openai/codex",),
        _CODEX,
        "codex",
        tongue=_SHELL,
        window=16_384,
        asks_for_summary="CONTEXT CHECKPOINT COMPACTION",
        own=((*_CODEX, "-c", "model_auto_compact_token_limit=11000"),),
    ),
    Client(
        "codex-items",
        ("npm:@openai/codex",),
        (
            *_CODEX,
            *("-c", "model_auto_compact_token_limit=12000"),
            # By this name it knows who compacts for it: it sends a trigger, and keeps the item.
            *("-c", "model_providers.litellm.name=OpenAI"),
        ),
        "codex",
        tongue=_SHELL,
        folder="codex",
        window=16_384,
        without={"own": "by the proxy's compaction items, in the task"},
    ),
    Client(
        "claude",
        ("npm:@anthropic-ai/claude-code",),
        _CLAUDE,
        "claude",
        tongue=Tongue(
            lambda path: ("Read", _json(file_path=str(path))),
            lambda path, content: ("Write", _json(file_path=str(path), content=content)),
        ),
        window=32_768,
        most_answer_tokens=7000,
        asks_for_summary="Your task is to create a detailed summary",
        own=(_CLAUDE, (*_CLAUDE, "--continue", "/compact"), (*_CLAUDE, "--continue")),
    ),
    Client(
        "opencode",
        ("npm:opencode-ai",),
        _OPENCODE,
        "opencode",
        tongue=Tongue(
            lambda path: ("read", _json(filePath=str(path))),
            lambda path, content: ("write", _json(filePath=str(path), content=content)),
        ),
        window=16_384,
        # `connect` tells it an answer of a quarter of the window.
        most_answer_tokens=3500,
        asks_for_summary="anchored summary|summary",
        own=(_OPENCODE,),
    ),
    Client(
        "aider",
        ("pip:aider-chat",),
        ("python", "{driver}"),
        "aider",
        tongue=Tongue(
            lambda _: ("", ""),
            lambda path, content: ("", f"{path.name}\n```\n{content}```\n"),
            is_text=True,
        ),
        asks_for_summary=r"\*Briefly\* summarize this partial conversation",
        without={"results": "no tools", "own": "only after an edit, as at the end of the task"},
    ),
    Client(
        "llm",
        ("pip:llm",),
        ("llm", "-m", "{model}", "--functions", "{driver}", "--chain-limit", "0"),
        "llm",
        without={"own": _NO_COMMAND},
    ),
    Client(
        "qwen",
        ("npm:@qwen-code/qwen-code",),
        _QWEN,
        "qwen",
        tongue=Tongue(
            lambda path: ("read_file", _json(file_path=str(path))),
            lambda path, content: ("write_file", _json(file_path=str(path), content=content)),
        ),
        window=32_768,
        # `connect` tells it 8,192.
        most_answer_tokens=7000,
        without={"own": "it is told no window, so that it never reaches its threshold"},
    ),
    Client(
        "cline",
        ("npm:cline",),
        _CLINE,
        "cline",
        tongue=Tongue(
            lambda path: ("read_files", _json(files=[{"path": str(path)}])),
            lambda path, content: ("editor", _json(path=str(path), new_text=content)),
            at_once=4,
            most_words=900,
        ),
        window=16_384,
        without={"own": "it is told no window, so that it never reaches its threshold"},
    ),
    Client(
        "continue",
        ("npm:@continuedev/cli",),
        ("cn", "-p", "--auto", "{prompt}"),
        "continue",
        tongue=Tongue(
            lambda path: ("Read", _json(filepath=str(path))),
            lambda path, content: ("Write", _json(filepath=str(path), content=content)),
        ),
        without={
            "long": "its answers are bounded to what a compaction leaves free",
            "own": "it is told more than any window, so that it never reaches its threshold",
        },
    ),
    Client(
        "mini-swe-agent",
        ("pip:mini-swe-agent", "pip:mcp"),
        ("mini", "-y", "--exit-immediately", "-m", "openai/{model}", "-t", "{prompt}"),
        "openai-python",
        tongue=Tongue(
            lambda path: ("bash", _json(command=f"cat {path.name}")),
            lambda path, content: ("bash", _json(command=f"cat >{path.name} <<'END'\n{content}END")),
            lambda text: ("bash", _json(command=f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo '{text}'")),
            at_once=3,
            # It shows 10,000 characters of an output.
            most_words=1000,
        ),
        environ={"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"},
        without={"own": _NO_COMMAND, "long": "each of its answers is a call"},
    ),
    Client(
        "open-webui",
        ("pip:open-webui",),
        ("python", "{driver}"),
        "open-webui",
        environ=_OPEN_WEBUI,
        has_server=True,
        without={"own": _NO_COMMAND},
    ),
)

LIBRARIES: tuple[Client, ...] = (
    _sdk("openai-python-chat", "pip:openai", connect="openai-python", folder="openai-python"),
    _sdk(
        "openai-python-responses",
        "pip:openai",
        connect="openai-python",
        folder="openai-python",
    ),
    _sdk("openai-node-chat", "npm:openai", connect="openai-node", folder="openai-node"),
    _sdk("openai-node-responses", "npm:openai", connect="openai-node", folder="openai-node"),
    _sdk("anthropic-python", "pip:anthropic", connect="claude", most_answer_tokens=7000),
    _sdk("anthropic-node", "npm:@anthropic-ai/sdk", connect="claude", most_answer_tokens=7000),
    _sdk("litellm", "pip:litellm", connect="openai-python"),
    _sdk(
        "langchain",
        "pip:langchain",
        "pip:langchain-openai",
        "pip:langgraph",
        connect="langchain",
    ),
    _sdk(
        "openai-agents-chat",
        "pip:openai-agents",
        connect="openai-python",
        folder="openai-agents",
        environ={"OPENAI_AGENTS_API": "chat_completions"},
    ),
    _sdk(
        "openai-agents-responses",
        "pip:openai-agents",
        connect="openai-python",
        folder="openai-agents",
        environ={"OPENAI_AGENTS_API": "responses"},
    ),
    _sdk("pydantic-ai", "pip:pydantic-ai-slim[openai]", connect="openai-python"),
    _sdk(
        "llama-index",
        "pip:llama-index-core",
        "pip:llama-index-llms-openai-like",
        connect="openai-python",
    ),
    _sdk("vercel", "npm:ai", "npm:@ai-sdk/openai-compatible", "npm:zod", connect="vercel"),
)

CLIENTS = (*LIBRARIES, *PROGRAMS)


def driver_of(client: Client) -> Path:
    """The program that runs a library; rows that share an installation share it, too."""
    suffix = "mjs" if client.command[0] == "node" else "py"
    return Path(__file__).parent / "drivers" / f"run_{client.home.replace('-', '_')}.{suffix}"
