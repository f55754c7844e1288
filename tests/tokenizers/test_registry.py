"""Token lengths: any string, offline, in pieces that cost what the whole costs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from litellm_compaction.errors import CompactionError
from litellm_compaction.tokenizers import registry
from litellm_compaction.tokenizers.registry import is_loaded, token_length, vocabulary

NAMES = ("cl100k_base", "o200k_base", "gpt-oss", "llama3", "llama2", "mistral-v3", "tekken", "qwen2", "deepseek-v3")
PUBLISHED = ("cl100k_base", "o200k_base")
ANY_TEXT = st.text(st.characters(codec=None))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text",
    [
        " " * 1_000_000,
        "\n" * 100_000,
        "a" * 100_000,
        "\x00" * 10_000,
        "\ud800" * 5000,
        "x\udfff<|endoftext|>\ud83d",
        "中" * 20_000,
        "👩‍👩‍👧" * 5000,
        " \t\n" * 50_000,
    ],
    ids=["spaces", "newlines", "letters", "nuls", "surrogates", "mixed", "cjk", "emoji", "whitespace"],
)
def test_hard_texts_are_counted(name: str, text: str) -> None:
    """What makes tiktoken raise or panic gets a number between one token and one per byte (SPM: three per space)."""
    assert 1 <= token_length(name, text) <= 3 * len(text.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_special_tokens_are_ordinary_text(name: str) -> None:
    """Text that reads like a special token is several tokens."""
    assert token_length(name, "<|endoftext|>") > 3
    assert token_length(name, "") == 0


@settings(max_examples=settings().max_examples * 5, deadline=None)
@given(text=ANY_TEXT, name=st.sampled_from(NAMES))
def test_any_string_has_a_length(text: str, name: str) -> None:
    """No string raises, none is negative, none costs more than its bytes."""
    assert 0 <= token_length(name, text) <= max(1, 4 * len(text))


def test_an_unknown_vocabulary_is_not_downloaded() -> None:
    """A file that is not on this machine is an error that says where it was looked for."""
    with pytest.raises(CompactionError, match="no_such_base is not in"):
        vocabulary("no_such_base")
    assert not is_loaded("no_such_base")


@pytest.mark.parametrize("folder", [None, "empty"])
def test_loading_needs_no_network_and_leaves_the_environment(folder: str | None, tmp_path: Path) -> None:
    """The files come from LiteLLM's folder, without importing LiteLLM, and TIKTOKEN_CACHE_DIR stays as it was."""
    code = (
        "import os, socket, sys\n"
        "def refuse(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        "before = os.environ.get('TIKTOKEN_CACHE_DIR')\n"
        "from litellm_compaction.tokenizers.registry import token_length\n"
        "assert token_length('o200k_base', 'hello world') == 2\n"
        "assert token_length('cl100k_base', 'hello world') == 2\n"
        "assert os.environ.get('TIKTOKEN_CACHE_DIR') == before\n"
        "assert 'litellm' not in sys.modules\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TIKTOKEN_CACHE_DIR"}
    if folder is not None:
        environment["TIKTOKEN_CACHE_DIR"] = str(tmp_path) if folder else ""
    root = Path(registry.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_threads_load_one_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that ask at the same time get the same object, loaded once."""
    loads: list[str] = []
    load = registry._load
    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.setattr(registry, "_load", lambda name: loads.append(name) or load(name))
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(vocabulary("cl100k_base"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1
    assert len({id(one) for one in found}) == 1
