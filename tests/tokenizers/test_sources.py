"""By what a deployment is counted: the order of sources, what a file gives, and what happens where one fails."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.config import Settings
from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.errors import CompactionError, ConfigError
from litellm_compaction.tokenizers import files, registry, sources
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokenizers.model_files import ModelFiles
from litellm_compaction.tokenizers.sources import (
    Sources,
    TokenizerSource,
    check_sources,
    check_tokenizer,
    is_this_machine,
    tokenizer_path,
)
from litellm_compaction.tokens.counter import Count, TokenCounter
from litellm_compaction.windows.lmstudio import WantedModel
from litellm_compaction.windows.windows import Target
from tests import virtual_time
from tests.tokenizers.gguf_writer import bpe_fields, gguf
from tests.tokenizers.vocabulary_files import template_source, write_pack_gguf, write_tokenizer_json

CASES: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "tokens" / "golden" / "prompts.json").read_text("utf-8")
)["cases"]
LOCAL = "http://127.0.0.1:1234/v1"
WANTED = WantedModel(key="tiny", publisher="p", file_format="gguf")
# A vocabulary in this package, a template in it, and how the model is called whose they are.
FAMILIES = [
    ("qwen2", "qwen3", "qwen3", "qwen3-8b"),
    ("llama3", "llama3.1", "llama", "llama-3.1-8b"),
    ("llama2", "llama2", "llama", "llama-2-7b"),
    ("mistral-v3", "mistral-v3", "llama", "mistral-7b-instruct-v0.3"),
    ("tekken", "mistral-nemo", "llama", "mistral-nemo-instruct-2407"),
    ("deepseek-v3", "deepseek-v3.1", "deepseek2", "deepseek-v3.1"),
    ("phi3", "phi3.5", "phi3", "phi-3.5"),
    ("gemma4", "gemma4", "gemma4", "gemma-4-26b"),
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


@pytest.mark.parametrize("api_base", ["http://192.168.1.7:1234/v1", "http://studio:1234/v1", None])
async def test_files_here_say_nothing_of_servers_elsewhere(downloaded: Path, api_base: str | None) -> None:
    """Unless the operator says where that server's models are, as in a container."""
    asked = target(api_base=api_base)
    assert (await source_of(lm_studio(downloaded), asked)).kind == "stand_in"
    assert (await source_of(lm_studio(downloaded, is_folder_given=True), asked)).kind == "lm_studio_file"


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


async def test_a_damaged_model_file_gives_way_to_the_pack(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Cut short, as by a download that was stopped."""
    path = write_pack_gguf(tmp_path / "p" / "tiny-GGUF" / "tiny.gguf", "llama2", "llama2")
    path.write_bytes(path.read_bytes()[:5000])
    caplog.set_level(logging.WARNING, logger="litellm_compaction")
    found = await lm_studio(tmp_path).source(target("tiny"), "qwen3", WANTED, patient=True)
    assert (found.kind, found.family.name) == ("pack", "qwen3")
    assert len(caplog.records) == 1


async def test_a_vocabulary_that_cannot_be_built_is_no_source(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file may be well formed and still hold nonsense; requests go on."""
    path = tmp_path / "p" / "tiny-GGUF" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(gguf(bpe_fields(tokenizer__chat_template="{{ broken")))
    found = await source_of(lm_studio(tmp_path), target())
    assert found.template == "formula"
    assert not found.family.exact
    assert (await count(found.family, request("agent, 1 call"))).tokens > 0


async def test_tools_are_counted_with_the_template_for_tools(tmp_path: Path) -> None:
    """A file with two templates: the one named tool_use serves requests with tools, as in llama.cpp."""
    path = write_pack_gguf(tmp_path / "m.gguf", "qwen2", "qwen2.5", tool_template="qwen3-coder")
    family = (await source_of(Sources(), target(tokenizer=str(path)), None)).family
    plain, tools = request("system and text"), request("two tools, short")
    qwen25, coder = family_of("qwen2", "qwen2.5-7b"), family_of("qwen3moe", "qwen3-coder-30b")
    assert (await count(family, plain)).tokens == (await count(qwen25, plain)).tokens
    assert (await count(family, tools)).tokens == (await count(coder, tools)).tokens
    assert (await count(coder, tools)).tokens != (await count(qwen25, tools)).tokens


@pytest.mark.parametrize(("flag", "extra"), [(True, 1), (False, 0)])
async def test_the_space_in_front_is_the_files_to_decide(tmp_path: Path, flag: bool, extra: int) -> None:
    """`add_space_prefix` holds for spm, whatever the vocabulary looks like."""
    path = write_pack_gguf(
        tmp_path / "m.gguf", "llama2", "llama2", **{"tokenizer.ggml.add_space_prefix": ("bool", flag)}
    )
    words = registry.vocabulary(files.load_tokenizer_file(path).vocabulary)
    # Two line feeds are two bytes, and a space before them is a token of its own.
    assert words.lengths_in_prompt(["\n\n"]) == [2 + extra]


async def test_an_mlx_folder_is_counted_by_its_tokenizer_json(tmp_path: Path) -> None:
    """Every byte is a token here, so that the rendered prompt says how many there must be."""
    write_tokenizer_json(tmp_path / "p" / "tiny-mlx", "qwen2.5")
    wanted = WantedModel(key="tiny-mlx", publisher="p", file_format="mlx")
    found = await source_of(lm_studio(tmp_path), target("tiny-mlx"), wanted)
    assert (found.kind, found.template) == ("lm_studio_file", "file")
    made = await count(found.family, Request(messages=(parse_message({"role": "user", "content": "Grüße"}),)))
    prompt = (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nGrüße<|im_end|>\n<|im_start|>assistant\n"
    )
    special = prompt.count("<|")
    text = prompt.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert made.tokens == len(text.encode()) + special
    assert made.exact


async def test_a_tokenizer_json_alone_takes_the_familys_template(tmp_path: Path) -> None:
    """Near, but not called exact: nobody says that the two belong together."""
    folder = write_tokenizer_json(tmp_path / "m", "qwen2.5")
    (folder / "chat_template.jinja").unlink()
    found = await Sources().source(target("qwen2.5-7b", tokenizer=str(folder)), "qwen2", None, patient=True)
    assert (found.kind, found.template, found.family.exact) == ("operator", "package", False)


async def test_heuristic_is_four_characters_a_token() -> None:
    """`ceil(chars / 4)`, for those who want it."""
    family = (await source_of(Sources(tokenizer="heuristic"), target())).family
    for chars in (1, 4, 5, 10_001):
        made = await count(family, Request(messages=(parse_message({"role": "user", "content": "x" * chars}),)))
        assert made.tokens == -(-chars // 4)
        assert not made.exact


async def test_files_are_read_once_for_all_who_ask(downloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten requests at once, and later ones, share one reading; a changed file is read again."""
    read: list[Path] = []
    original = files.read_gguf
    monkeypatch.setattr(files, "read_gguf", lambda path: (read.append(path), original(path))[1])
    now_s = 0.0
    found = lm_studio(downloaded, clock=lambda: now_s)
    await asyncio.gather(*(source_of(found, target()) for _ in range(10)))
    now_s = 1000.0
    await source_of(found, target())
    assert len(read) == 1
    write_pack_gguf(downloaded / "p" / "tiny-GGUF" / "tiny-Q4_K_M.gguf", "llama2", "llama2")
    now_s = 2000.0
    changed = await source_of(found, target())
    assert len(read) == 2
    assert changed.family.vocabulary != family_of("qwen3", "x").vocabulary
    assert (await count(changed.family, request("system and text"))).tokens == (
        await count(family_of("llama", "llama-2-7b"), request("system and text"))
    ).tokens


def test_no_request_waits_long_for_a_file(downloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs: all requests together wait for the limit once, and one after it answers gets the file."""
    release = threading.Event()
    original = sources.load_tokenizer_file
    monkeypatch.setattr(sources, "load_tokenizer_file", lambda path: (release.wait(60), original(path))[1])

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        found = lm_studio(downloaded, wait_s=0.5, clock=loop.time)
        for _ in range(5):
            made = await found.source(target(), "", WANTED)
            assert made.kind == "stand_in"
            assert loop.time() == pytest.approx(0.5)
        release.set()
        assert (await source_of(found, target())).kind == "lm_studio_file"
        assert (await found.source(target(), "", WANTED)).kind == "lm_studio_file"

    virtual_time.run(ask(), in_threads=True)


async def test_a_pack_that_is_not_loaded_is_not_loaded_instead(
    downloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would take longer than the file alone, and twice the memory."""
    release = threading.Event()
    original = sources.load_tokenizer_file
    monkeypatch.setattr(sources, "load_tokenizer_file", lambda path: (release.wait(60), original(path))[1])
    monkeypatch.setattr(sources, "is_loaded", lambda name: False)
    monkeypatch.setattr(sources, "_COLD_WAIT_S", 60.0)
    # The disk answers long after the usual limit.
    asyncio.get_running_loop().call_later(0.2, release.set)
    made = await lm_studio(downloaded, wait_s=0.01).source(target(), "qwen3", WANTED)
    assert made.kind == "lm_studio_file"


async def test_whoever_stops_waiting_stops_nobody_else(downloaded: Path) -> None:
    """A client that goes away leaves the reading to the others."""
    found = lm_studio(downloaded, wait_s=10)
    first = asyncio.ensure_future(found.source(target(), "", WANTED))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await source_of(found, target())).kind == "lm_studio_file"
    await found.aclose()


@pytest.mark.parametrize(
    ("api_base", "expected"),
    [
        (LOCAL, True),
        ("http://localhost:1234", True),
        ("localhost:1234/v1", True),
        ("http://[::1]:1234/v1", True),
        ("http://0.0.0.0:1234/v1", True),
        ("http://127.8.9.1:1", True),
        ("http://10.0.0.1:1234", False),
        ("http://localhost.example.com", False),
        ("http://[::1", False),
        ("", False),
        (None, False),
    ],
)
def test_only_loopback_is_this_machine(api_base: str | None, expected: bool) -> None:
    """Whatever else resolves to it, nobody is asked."""
    assert is_this_machine(api_base) is expected


@pytest.mark.parametrize("value", ["auto", "heuristic", "llama-3.1-8b", "qwen3"])
def test_known_names_are_settings(value: str) -> None:
    """Names need no file."""
    check_tokenizer(value, "place.tokenizer")
    assert tokenizer_path(value) is None


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


async def test_a_missing_template_refuses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula counts instead, with its own bound."""
    monkeypatch.setattr(registry, "_broken_templates", set())
    family = registry.replace(family_of("qwen3", "qwen3-8b"), template="no-such-template")
    made = await count(family, request("agent, 6 calls"))
    assert made.tokens > 0
    assert not made.exact
    assert made.error_ratio >= 0.15


def test_packs_are_read_for_nobody_twice_when_damaged(damaged: None) -> None:
    """Every request would pay for it."""
    for _ in range(2):
        with pytest.raises(CompactionError, match="damaged"):
            registry.vocabulary("qwen2")
    assert registry.is_broken("qwen2")
    assert registry.has_pack("qwen2")


def test_templates_of_files_are_the_files(tmp_path: Path) -> None:
    """Equal templates and vocabularies are kept once, however many files carry them."""
    one = files.load_tokenizer_file(write_pack_gguf(tmp_path / "a.gguf", "llama2", "llama2"))
    two = files.load_tokenizer_file(write_pack_gguf(tmp_path / "b.gguf", "llama2", "mistral-v1"))
    assert one.vocabulary == two.vocabulary
    assert one.template != two.template
    assert template_source(one.template) == template_source("llama2")


async def test_the_file_that_a_server_names_counts(tmp_path: Path) -> None:
    """llama.cpp says which file it has loaded: exact where it is on this machine, ignored where it is not."""
    path = write_pack_gguf(tmp_path / "weights.gguf", "qwen2", "qwen3")
    named = WantedModel(key="tiny", path=str(path))
    found = await source_of(Sources(files=ModelFiles(tmp_path)), target(), named)
    assert (found.kind, found.path, found.family.exact) == ("server_file", path, True)
    for other in (
        (target(api_base="http://10.0.0.7:8080/v1"), named),
        (target(), WantedModel(key="tiny", path="weights.gguf")),
        (target(), WantedModel(key="tiny", path=str(tmp_path / "gone.gguf"))),
        (target(), WantedModel(key="tiny", path="/etc/passwd")),
    ):
        assert (await source_of(Sources(files=ModelFiles(tmp_path)), *other)).kind == "stand_in"
