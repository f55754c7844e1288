"""`connect`: the lines for each client, the model and the window behind them, and what is never printed."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tomlkit
import yaml

from litellm_compaction.cli.app import main
from litellm_compaction.cli.connect import CLIENTS, Place, filled, sections
from litellm_compaction.cli.shells import content_of, quoted, variable
from tests.cli.conftest import GPT_OSS, NOWHERE, QWEN
from tests.integration.plain_server import PlainServer
from tests.lmstudio_double import Address, Simulator

KEY = "sk-connect-0123456789abcdefghij"
Connect = Callable[..., tuple[int, str, str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without clients, and an environment with a key."""
    for name in ("CODEX_HOME", "XDG_CONFIG_HOME", "CONTINUE_GLOBAL_DIR", "QWEN_HOME", "LLM_USER_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("LITELLM_COMPACTION_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("LITELLM_MASTER_KEY", KEY)
    monkeypatch.delenv("LM_STUDIO_API_KEY", raising=False)
    return tmp_path


@pytest.fixture
def connect(
    home: Path, address: Address, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Connect:
    """Runs `connect` with the simulator behind a proxy that does not answer: exit code, output, errors."""

    def run(*arguments: str, base_url: str = "127.0.0.1:9") -> tuple[int, str, str]:
        monkeypatch.setenv("LM_STUDIO_API_BASE", f"{address.base_url}/v1")
        code = main(["connect", *arguments, "--base-url", base_url])
        output, errors = capsys.readouterr()
        assert KEY not in output + errors
        return code, output, errors

    return run


def reload(simulator: Simulator, tokens: int) -> None:
    """The model with another window."""
    simulator.unload(QWEN)
    simulator.load(QWEN, tokens)


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
def test_every_client_gets_address_model_and_a_name_for_the_key(name: str, connect: Connect) -> None:
    """Nothing is left to fill in; the key is a variable's."""
    code, output, errors = connect(name)
    assert code == 0, errors
    assert f"lm_studio/{QWEN}" in output
    assert "http://127.0.0.1:9" in output
    assert "LITELLM_MASTER_KEY" in output
    assert not re.search(r"\{(model|url|root|window|answer|prompt|most)\}", output)


def test_a_small_window_is_warned_of(connect: Connect, simulator: Simulator) -> None:
    """By the client's own prompt: too small to work with, small, and large enough."""
    assert "11,600 of the 8,192 tokens: too little is left to work with" in connect("claude")[2]
    assert connect("continue")[2] == ""
    reload(simulator, 16_384)
    assert "8,500 of the 16,384 tokens: compactions will be frequent" in connect("codex")[2]
    assert "Load the model with 32,768 or more (16,384 at least)" in connect("codex")[2]
    reload(simulator, 32_768)
    assert connect("codex")[2] == ""


@pytest.mark.parametrize(
    ("window_tokens", "longest", "is_told"), [(8192, 2048, False), (32_768, 16_384, False), (65_536, 16_384, True)]
)
def test_an_answer_may_take_what_is_free(window_tokens: int, longest: int, is_told: bool) -> None:
    """Beside Claude Code's own prompt; its own compaction begins behind that prompt, wherever it is told a window."""
    table = filled("claude", Place("lm_studio/any", window_tokens, "http://127.0.0.1:4000"))
    environment = table["environment"]
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == longest
    told = environment.get("CLAUDE_CODE_MAX_CONTEXT_TOKENS", 0)
    assert told == window_tokens * is_told
    assert not told or told - longest - 13_000 > 2 * table["prompt_tokens"]


def test_several_loaded_models_are_a_choice(connect: Connect, simulator: Simulator) -> None:
    """Exit code 2, and their names; --model takes one of them."""
    simulator.load(GPT_OSS, 4096)
    code, output, errors = connect("llm")
    assert (code, output) == (2, "")
    assert QWEN in errors
    assert GPT_OSS in errors
    code, output, _ = connect("llm", "--model", GPT_OSS)
    assert (code, f"lm_studio/{GPT_OSS}" in output) == (0, True)
    assert connect("llm", "--model", f"lm_studio/{GPT_OSS}")[1] == output


def test_a_model_that_is_not_loaded_has_no_window(connect: Connect, simulator: Simulator) -> None:
    """LM Studio knows it or not; with none loaded there is no choice, and without LM Studio its address is named."""
    for name in (GPT_OSS, "nobody/knows"):
        code, output, errors = connect("llm", "--model", name)
        assert (code, output) == (1, "")
        assert "not loaded" in errors
        assert f"Loaded: {QWEN}" in errors
    assert f"No LM Studio answers at {NOWHERE}" in connect("llm", "--lm-studio", NOWHERE)[2]
    simulator.unload(QWEN)
    code, _, errors = connect("llm")
    assert (code, "Loaded: none" in errors) == (2, True)


def test_a_model_that_the_proxy_names_has_its_window(connect: Connect, plain: PlainServer) -> None:
    """By `/v1/models`; a name without a window, or in another shape, is looked for in LM Studio."""
    plain.gets["/v1/models"] = {"data": [{"id": "local", "max_input_tokens": 32_768}, {"id": QWEN}]}
    code, output, _ = connect("codex", "--model", "local", base_url=f"{plain.base_url}/v1/")
    assert code == 0
    assert f'base_url = "{plain.base_url}/v1"' in output
    assert 'model = "local"\n' in output
    assert "model_context_window = 32768" in output
    assert f"lm_studio/{QWEN}" in connect("codex", "--model", QWEN, base_url=plain.base_url)[1]
    plain.gets["/v1/models"] = {"data": ["local"]}
    assert connect("codex", "--model", "local", base_url=plain.base_url)[0] == 1


@pytest.mark.parametrize(
    "arguments", [["nobody"], ["claude", "--write"], ["codex", "--write", "--json"], ["codex", "--shell", "fish"], []]
)
def test_wrong_arguments_end_with_2(arguments: list[str], connect: Connect) -> None:
    """A name that is not in the table; no file to write; options that exclude each other."""
    code, output, errors = connect(*arguments)
    assert (code, output) == (2, "")
    assert "Error: " in errors


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
    # By the master key's own name only where a client's file says that name.
    assert exported(output, key="").get("LITELLM_MASTER_KEY", "") == ""
    assert exported(connect("codex")[1].splitlines()[1], key="") == {"LITELLM_MASTER_KEY": KEY}


def test_names_are_quoted_for_each_reader() -> None:
    """A model's name is a server's word: a shell, a file and a program read it as one."""
    name = 'it\'s "a" $(touch x) `x` ’ \\ größe'
    place = Place(name, 8192, "http://127.0.0.1:4000")
    [(_, _, posix)] = sections({"environment": {"A": name}}, "")
    assert shlex.split(posix) == ["export", f"A={name}"]
    [(_, _, powershell)] = sections({"environment": {"A": name, "K": "$LITELLM_MASTER_KEY"}}, "", powershell=True)
    quoted = name.replace("'", "''").replace("’", "’’")
    assert powershell == f"$env:A = '{quoted}'\n$env:K = $env:LITELLM_MASTER_KEY"
    [(_, language, code)] = sections(filled("langchain", place), "")
    assert language == "python"
    compiled = compile(code, "langchain", "exec")
    assert name in {value for value in compiled.co_consts if isinstance(value, str)}
    for client, read in (("codex", tomlkit.parse), ("llm", yaml.safe_load), ("opencode", json.loads)):
        table = filled(client, place)
        texts = [text for heading, _, text in sections(table, table["files"][0]) if heading == table["files"][0]]
        assert [read(text) for text in texts] == [table["lines"]]


def test_write_shows_asks_and_writes(connect: Connect, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer, no, yes, and once more, with nothing left to do."""
    path = home / ".codex" / "config.toml"
    path.parent.mkdir()
    path.write_text('model = "gpt"  # mine\n', encoding="utf-8")
    code, _, errors = connect("codex", "--write")
    assert (code, "--yes" in errors) == (1, True)
    terminal = io.StringIO("n\n")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)
    code, output, _ = connect("codex", "--write")
    assert (code, output.splitlines()[-1].endswith("Nothing was written.")) == (1, True)
    assert '-model = "gpt"  # mine' in output
    assert path.read_text("utf-8") == 'model = "gpt"  # mine\n'
    code, output, _ = connect("codex", "--write", "--yes")
    assert (code, output.splitlines()[-1]) == (0, f"Written; the old file is {path}.bak.")
    assert tomlkit.parse(path.read_text("utf-8"))["model_context_window"] == 8192
    code, output, _ = connect("codex", "--write")
    assert (code, output.splitlines()[-1]) == (0, f"# {path} has these lines already.")
    assert len(list(path.parent.iterdir())) == 2


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell reads the lines")
def test_a_unix_shell_reads_back_what_was_meant(tmp_path: Path) -> None:
    """Blanks, quotes and dollars included."""
    text, file = 'it\'s $HOME `a` "b"', tmp_path / "a b's key"
    file.write_text("sk-1\n", encoding="utf-8")
    line = f'printf "%s|" {quoted(text, powershell=False)} "{variable("K", powershell=False)}"'
    line += f' "{content_of(str(file), powershell=False)}"'
    told = subprocess.run(["/bin/sh", "-c", line], env={"K": "v"}, capture_output=True, text=True, check=True)
    assert told.stdout == f"{text}|v|sk-1|"


def test_powershell_doubles_its_quotes() -> None:
    """Typographic ones as well, which it takes for plain ones; nothing else means anything between them."""
    assert quoted("it's ’$x", powershell=True) == "'it''s ’’$x'"
    assert variable("K", powershell=True) == "$env:K"
    assert content_of(r"C:\a b\key", powershell=True) == r"$(Get-Content 'C:\a b\key')"
