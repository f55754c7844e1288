"""`connect`: the lines for each client, the model and the window behind them, and what is never printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from litellm_compaction.cli.app import main
from litellm_compaction.cli.connect import CLIENTS, Place, filled, sections
from tests.cli.conftest import NOWHERE, QWEN, Run
from tests.integration.plain_server import PlainServer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME = f"lm_studio/{QWEN}"
KEY = "sk-connect-0123456789abcdefghij"
Connect = Callable[..., tuple[int, str, str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without clients, and an environment with a key."""
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("LITELLM_COMPACTION_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("LITELLM_MASTER_KEY", KEY)
    return tmp_path


@pytest.fixture
def connect(home: Path, plain: PlainServer, capsys: pytest.CaptureFixture[str]) -> Connect:
    """Runs `connect` with a proxy that lists models and windows: exit code, output, errors."""

    def run(*arguments: str, **windows: int | None) -> tuple[int, str, str]:
        models = windows or {NAME: 8192, "cold": None}
        plain.gets["/v1/models"] = {"data": [{"id": name, "max_input_tokens": each} for name, each in models.items()]}
        code = main(["connect", *arguments, "--base-url", f"{plain.base_url}/v1/"])
        output, errors = capsys.readouterr()
        assert KEY not in output + errors
        return code, output, errors

    return run


def exported(output: str, *, key: str = KEY) -> dict[str, str]:
    """The variables that a shell has after it has read the lines."""
    done = subprocess.run(
        ["sh", "-c", f'{output}\n"$0" -c "import json, os; print(json.dumps(dict(os.environ)))"', sys.executable],
        env={"PATH": os.environ["PATH"], "LITELLM_MASTER_KEY": key},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return {name: value for name, value in found.items() if name not in ("PATH", "PWD", "SHLVL", "_", "LC_CTYPE")}


@pytest.mark.parametrize("name", CLIENTS)
def test_every_client_gets_address_model_and_a_name_for_the_key(
    name: str, connect: Connect, plain: PlainServer
) -> None:
    """Nothing is left to fill in; the key is a variable's."""
    code, output, errors = connect(name)
    assert code == 0, errors
    assert NAME in output
    assert plain.base_url in output
    assert "LITELLM_MASTER_KEY" in output
    assert not re.search(r"\{(model|url|root|window|answer|prompt|most)\}", output)
    assert plain.requests[-1].headers["authorization"] == f"Bearer {KEY}"


def test_a_small_window_is_warned_of(connect: Connect) -> None:
    """By the client's own prompt: too small to work with, small, and large enough."""
    assert "11,600 of the 8,192 tokens: too little is left to work with" in connect("claude")[2]
    assert connect("continue")[2] == ""
    said = connect("codex", qwen=16_384)[2]
    assert "8,500 of the 16,384 tokens: compactions will be frequent" in said
    assert "Load the model with 32,768 or more (16,384 at least)" in said
    assert connect("codex", qwen=32_768)[2] == ""


@pytest.mark.parametrize(
    ("window_tokens", "longest", "is_told"), [(8192, 2048, False), (32_768, 16_384, False), (65_536, 16_384, True)]
)
def test_an_answer_may_take_what_is_free(window_tokens: int, longest: int, is_told: bool) -> None:
    """Beside Claude Code's own prompt; its own compaction begins behind that prompt, wherever it is told a window."""
    table = filled("claude", Place("lm_studio/any", window_tokens, "http://127.0.0.1:4000"))
    environment = table["environment"]
    assert int(environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == longest
    told = int(environment.get("CLAUDE_CODE_MAX_CONTEXT_TOKENS", 0))
    assert told == window_tokens * is_told
    assert not told or told - longest - 13_000 > 2 * table["prompt_tokens"]


@pytest.mark.parametrize(
    ("arguments", "windows", "code", "said"),
    [
        (["llm"], {"one": 4096, "two": 8192}, 2, "choose one with --model. With a window now: one, two"),
        (["llm"], {"one": None}, 2, "load a model first. With a window now: none"),
        (["llm", "--model", "two"], {"one": 4096, "two": 8192}, 0, 'model_id: "two"'),
        (["llm", "--model", "qwen"], {"lm_studio/qwen": 4096}, 0, 'model_id: "lm_studio/qwen"'),
        (["llm", "--model", "two"], {"one": 4096, "two": None}, 1, "lists 'two' without a window, or not at all: load"),
        (["nobody"], {"one": 4096}, 2, "'nobody' is none of claude, codex"),
        (["codex"], {"one": 4096}, 0, "model_context_window = 4096"),
    ],
)
def test_a_model_is_chosen(
    connect: Connect, arguments: list[str], windows: dict[str, int | None], code: int, said: str
) -> None:
    """The one that has a window, or that --model names as the proxy or LM Studio does."""
    found, output, errors = connect(*arguments, **windows)
    assert (found, said in output + errors) == (code, True), output + errors


@pytest.mark.parametrize("address", [NOWHERE, "http://[", "not a host"])
def test_without_a_proxy_there_are_no_lines(address: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to start, whatever the key is made of."""
    monkeypatch.setenv("LITELLM_MASTER_KEY", "sk-größe")
    code, output, errors = run("connect", "llm", "--base-url", address)
    assert (code, output) == (1, "")
    assert "start it (`litellm-compaction up`)" in errors


def test_another_server_is_no_proxy(connect: Connect, plain: PlainServer, run: Run) -> None:
    """Its answer has another shape, or is no JSON."""
    for answer in ({"data": ["local"]}, {"models": []}, 7):
        plain.gets["/v1/models"] = answer
        code, _, errors = run("connect", "llm", "--base-url", plain.base_url)
        assert (code, "is it a LiteLLM proxy, and LITELLM_MASTER_KEY its key?" in errors) == (1, True)


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell reads the lines")
def test_a_kept_key_is_read_by_the_shell(connect: Connect, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines name the file that `up` has made, in a folder with blanks and quotes; without one a warning says so."""
    folder = home / "it's mine"
    monkeypatch.setenv("LITELLM_COMPACTION_HOME", str(folder))
    monkeypatch.delenv("LITELLM_MASTER_KEY")
    assert "LITELLM_MASTER_KEY is not set" in connect("aider")[2]
    assert not folder.exists()
    folder.mkdir()
    (folder / "master_key").write_text(f"{KEY}\n", encoding="utf-8")
    code, output, errors = connect("aider")
    assert (code, errors) == (0, "")
    assert exported(output, key="")["OPENAI_API_KEY"] == KEY


@pytest.mark.parametrize("name", ['it\'s "a"', "$(touch x)", "`x`", "a\\", "a\n", "\x1b[2J", "a;b", "${A}", ""])
def test_a_name_that_a_reader_could_misread_is_not_offered(connect: Connect, name: str) -> None:
    """A model's name is a server's word: a shell, a file and a program read the others as they are."""
    code, output, errors = connect("codex", **{name: 8192, "größe/qwen3.5:8b @+ -x": 8192})
    assert (code, errors.count("\n") > 0, 'model = "größe/qwen3.5:8b @+ -x"' in output) == (0, True, True)
    assert connect("codex", "--model", name, **{name: 8192})[0] == 1


def test_what_a_file_holds_can_be_read() -> None:
    """As its language has it."""
    place = Place("größe/qwen3.5:8b", 8192, "http://127.0.0.1:4000")
    readers: dict[str, Callable[[str], Any]] = {"toml": tomllib.loads, "yaml": yaml.safe_load, "json": json.loads}
    for client in CLIENTS:
        for _, language, text in sections(filled(client, place)):
            assert not text or readers.get(language, str)(text)
