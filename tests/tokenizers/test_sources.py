"""By what a deployment is counted: the order of sources, what a file gives, and what happens where one fails."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.config import Settings
from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.errors import CompactionError, ConfigError
from litellm_compaction.tokenizers import registry
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokenizers.model_files import ModelFiles
from litellm_compaction.tokenizers.sources import (
    Sources,
    TokenizerSource,
    check_sources,
    check_tokenizer,
)
from litellm_compaction.tokens.counter import Count, TokenCounter
from litellm_compaction.windows.lmstudio import WantedModel
from litellm_compaction.windows.windows import Target
from tests.tokenizers.vocabulary_files import write_pack_gguf

CASES: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "tokens" / "golden" / "prompts.json").read_text("utf-8")
)["cases"]
LOCAL = "http://127.0.0.1:1234/v1"
WANTED = WantedModel(key="tiny", publisher="p", file_format="gguf")
# A vocabulary in this package, a template in it, and how the model is called whose they are.
FAMILIES = [
    ("qwen2", "qwen3", "qwen3", "qwen3-8b"),
    ("llama2", "llama2", "llama", "llama-2-7b"),
    ("tekken", "mistral-nemo", "llama", "mistral-nemo-instruct-2407"),
]


def target(model: str = "tiny", *, api_base: str | None = LOCAL, tokenizer: str = "") -> Target:
    return Target(key=model, model=model, api_base=api_base, api_key=None, context_length=None, tokenizer=tokenizer)


def request(case: str) -> Request:
    found = CASES[case]
    return Request(messages=tuple(map(parse_message, found["messages"])), tools=tuple(found.get("tools", ())))


async def count(family: Family, asked: Request) -> Count:
    return await TokenCounter().count("t", family, asked)


async def source_of(found: Sources, asked: Target, wanted: WantedModel | None = WANTED) -> TokenizerSource:
    return await found.source(asked, "", wanted, patient=True)


def lm_studio(folder: Path, **options: Any) -> Sources:
    return Sources(files=ModelFiles(folder, home=folder / "home"), **options)


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """LM Studio's models folder with one model, which carries Qwen's vocabulary and template."""
    write_pack_gguf(tmp_path / "p" / "tiny-GGUF" / "tiny-Q4_K_M.gguf", "qwen2", "qwen3")
    return tmp_path


@pytest.mark.parametrize(("pack", "template", "architecture", "model"), FAMILIES, ids=[row[1] for row in FAMILIES])
def test_a_file_counts_like_the_pack_of_the_same_vocabulary(
    tmp_path: Path, pack: str, template: str, architecture: str, model: str
) -> None:
    """Every golden request costs the same, message by message, by a model's file and by what this package has."""
    path = write_pack_gguf(tmp_path / "m.gguf", pack, template)
    family = family_of(architecture, model)

    async def compare() -> None:
        named = target(model, tokenizer=str(path))
        found = await Sources().source(named, architecture, None, patient=True)
        assert (found.kind, found.path, found.template) == ("operator", path, "file")
        assert found.family.exact
        for case in CASES:
            ours, theirs = await count(found.family, request(case)), await count(family, request(case))
            assert (ours.sizes, ours.tools_tokens, ours.overhead_tokens) == (
                theirs.sizes,
                theirs.tools_tokens,
                theirs.overhead_tokens,
            ), case
            assert ours.rendered == theirs.rendered

    asyncio.run(compare())


async def test_lm_studios_own_file_comes_before_the_packs(downloaded: Path) -> None:
    """A model that nobody knows is counted exactly, by its file."""
    found = await source_of(lm_studio(downloaded), target())
    assert (found.kind, found.template) == ("lm_studio_file", "file")
    made = await count(found.family, request("agent, 6 calls"))
    assert made.exact
    assert made.tokens == (await count(family_of("qwen3", "qwen3-8b"), request("agent, 6 calls"))).tokens


async def test_the_operators_word_comes_first(downloaded: Path, tmp_path: Path) -> None:
    """The deployment's own over the global one, both over LM Studio's file."""
    other = write_pack_gguf(tmp_path / "other.gguf", "llama2", "llama2")
    found = lm_studio(downloaded, tokenizer=str(other))
    assert (await source_of(found, target())).path == other
    assert (await source_of(found, target(tokenizer="heuristic"))).kind == "heuristic"
    named = await source_of(found, target(tokenizer="llama-3.1-8b"))
    assert (named.kind, named.family.template) == ("operator", "llama3.1")
    assert (await source_of(found, target(tokenizer="auto"))).kind == "lm_studio_file"


async def test_without_a_file_the_family_decides(downloaded: Path) -> None:
    """A pack for a known family, else a stand-in."""
    found = lm_studio(downloaded)
    assert (await source_of(found, target("llama-3.1-8b"), None)).kind == "pack"
    unlisted = WantedModel(key="not-there")
    assert (await source_of(found, target("nobody-knows"), unlisted)).kind == "stand_in"


async def test_a_broken_file_warns_once_and_the_next_source_counts(
    downloaded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The operator's file is gone, so LM Studio's counts; the warning says what to do."""
    ticks = itertools.count(0, 1000)
    found = lm_studio(downloaded, clock=lambda: float(next(ticks)))
    caplog.set_level(logging.WARNING, logger="litellm_compaction")
    for _ in range(3):
        made = await source_of(found, target(tokenizer="/nonexistent/x.gguf"))
        assert made.kind == "lm_studio_file"
    [record] = caplog.records
    assert "/nonexistent/x.gguf" in record.message
    assert "Check the path" in record.message


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("/nonexistent/model.gguf", "No such file"),
        ("models/none/tokenizer.json", "No such file"),
        ("nobody-knows-this", "allowed: auto, heuristic"),
        ("~/x\0.gguf", "impossible path"),
    ],
)
def test_a_wrong_tokenizer_is_found_at_start(value: str, words: str) -> None:
    """The error names key and value, and says what to write."""
    with pytest.raises(ConfigError, match=r"place\.tokenizer = ") as caught:
        check_tokenizer(value, "place.tokenizer")
    assert repr(value) in str(caught.value)
    assert words in str(caught.value)


def test_a_file_of_another_kind_is_found_at_start(tmp_path: Path) -> None:
    """Neither text nor weights without a vocabulary count anything."""
    for name in ("x.gguf", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"{}")
        with pytest.raises(ConfigError, match=r"tokenizer = .*intact"):
            check_tokenizer(str(tmp_path / name), "tokenizer")


def test_a_models_folder_must_be_there(tmp_path: Path) -> None:
    """Otherwise every model would silently be counted by the next source."""
    check_sources(Settings(models_folder=str(tmp_path)), "s")
    with pytest.raises(ConfigError, match=r"s\.models_folder = "):
        check_sources(Settings(models_folder=str(tmp_path / "gone")), "s")


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pack can be read, and nothing has been loaded yet."""

    def fail(name: str) -> None:
        raise CompactionError(f"The vocabulary pack {name} is damaged: reinstall litellm-compaction.")

    monkeypatch.setattr(registry, "read_pack", fail)
    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.setattr(registry, "_broken", {})


async def test_a_damaged_pack_refuses_no_request(damaged: None, caplog: pytest.LogCaptureFixture) -> None:
    """A stand-in counts instead, errs high, and does not pass for exact; one warning says what to do."""
    caplog.set_level(logging.WARNING, logger="litellm_compaction")
    family = family_of("qwen3", "qwen3-8b")
    counter = TokenCounter()
    made = await counter.count("t", family, request("agent, 6 calls"))
    again = await counter.count("t", family, request("agent, 6 calls"))
    assert made == again
    assert not made.exact
    assert made.error_ratio >= 0.25
    assert await counter.count_text("t", family, "some text") == counter.text_counter("t", family)("some text") > 0
    [record] = caplog.records
    assert "reinstall" in record.message


async def test_without_any_vocabulary_characters_count(damaged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even LiteLLM's file is there."""
    monkeypatch.setattr(registry, "_folder", lambda name: (_ for _ in ()).throw(CompactionError("gone")))
    made = await count(family_of("qwen3", "qwen3-8b"), request("system and text"))
    assert made.tokens > 0
    assert not made.exact
