"""Threat: strangers' files. Whatever a template or a tokenizer says, it ends, and is not tried twice."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from litellm_compaction.errors import UnusableModelFile
from litellm_compaction.templates.contained import Contained, Died
from litellm_compaction.templates.environment import TemplateRefusal
from litellm_compaction.templates.template import StrangersTemplate, Template
from litellm_compaction.tokenizers import files
from litellm_compaction.tokenizers.files import read_tokenizer_json
from tests.security import bounded
from tests.security.templates import HELD, UNBOUNDED

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
MESSAGES = [
    {"role": "user" if index % 2 == 0 else "assistant", "content": f"words {index} " * 50} for index in range(40)
]
linux = pytest.mark.skipif(bounded.resource is None or os.name != "posix", reason="needs limits on processes")


@pytest.fixture(autouse=True)
def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What died in one test is not remembered in the next."""
    monkeypatch.setattr(files, "_died", {})


@pytest.fixture
def process() -> Iterator[Contained]:
    made = Contained()
    yield made
    made.end()


def _rendered(source: str) -> tuple[str, bool]:
    """What a template makes of a word, "" where it is refused; and if it took its process with it."""
    # 56 of them end so, as with fifteen times the limit; each tenth of a second more is six of processor time, and the
    # start of the processes nine (measured 2026-11-23).
    process = Contained(cpu_s=0.05)
    try:
        return StrangersTemplate(source, process).render([{"role": "user", "content": "x"}], []), False
    except TemplateRefusal as refusal:
        return "", isinstance(refusal.__cause__, Died)
    finally:
        process.end()


@linux
@pytest.mark.parametrize("each", [pytest.param(4, id="some"), pytest.param(1, id="all", marks=pytest.mark.full)])
def test_no_hostile_template_costs_the_proxy_anything(each: int) -> None:
    """Each of them is refused or bounded, in a process that the system ends; the proxy itself works 100 ms at most."""
    assert len(UNBOUNDED) >= 25
    sources = dict(list(UNBOUNDED.items())[::each])
    begun_s = time.process_time()
    with ThreadPoolExecutor(3) as threads:
        written = dict(zip(sources, threads.map(_rendered, sources.values()), strict=True))
    spent_s = time.process_time() - begun_s
    assert spent_s / len(sources) < 0.1, "the proxy's own processor time for each"
    assert {name: len(text) for name, (text, _) in written.items() if len(text) > 10_000} == {}
    died = [name for name, (_, has_died) in written.items() if has_died]
    assert len(died) >= len(sources) // 2, "these rows are no attacks any more"


@linux
def test_no_hostile_template_reaches_out() -> None:
    """What the sandbox holds is held: nothing of Python, no file, no change of a message."""
    for name, source in HELD.items():
        if name == "long":
            continue
        written, _ = _rendered(source)
        assert len(written) < 100_000, name
        for word in ("class '", "<function", "module", "root:", "uid="):
            assert word not in written, (name, written[:200])


@pytest.mark.parametrize("name", ["mutation", "mutation of a message", "dunder", "globals of a cycler"])
def test_a_strangers_source_is_compiled_in_the_sandbox_wherever_it_is(name: str) -> None:
    """`Template` itself knows by the text if it is this package's: no caller can take it for that by mistake."""
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(TemplateRefusal):
        Template(HELD[name]).render(messages, [])
    assert messages == [{"role": "user", "content": "x"}]


@linux
def test_a_template_that_ends_its_process_again_and_again_is_not_tried_any_more() -> None:
    """Three times; the others, which share the process, go on in a new one."""
    process = Contained(cpu_s=0.3)
    hostile, other = StrangersTemplate(UNBOUNDED["squares"], process), StrangersTemplate(CHATML, process)
    expected = other.parts(MESSAGES[:1], [])
    for _ in range(3):
        with pytest.raises(TemplateRefusal, match=r"too much time or memory$"):
            hostile.parts(MESSAGES[:1], [])
        assert other.parts(MESSAGES[:1], []) == expected
    running = process._process
    with pytest.raises(TemplateRefusal, match="before"):
        hostile.parts(MESSAGES[:1], [])
    assert process._process is running
    process.end()


@linux
def test_memory_is_bounded(process: Contained) -> None:
    """1 GiB, after which the process ends and another one works on."""
    with pytest.raises(Died):
        process.run("tests.security.test_files:fills", b"")
    assert process.run("tests.security.test_files:echo", b"x") == b"x"


def fills(_: bytes) -> bytes:
    """Takes more than a process may have."""
    return str(len(bytes(2 << 30))).encode()


def echo(payload: bytes) -> bytes:
    """Gives back what it got."""
    return payload


def test_the_process_gets_no_keys(process: Contained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the environment goes there, where keys are."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hidden")
    StrangersTemplate(CHATML, process).parts(MESSAGES[:1], [])
    assert process._process is not None
    environ = Path(f"/proc/{process._process.popen.pid}/environ")
    if environ.exists():
        assert b"sk-hidden" not in environ.read_bytes()


def test_a_request_that_is_too_long_ends_no_template(process: Contained) -> None:
    """Whoever sends a giant conversation gets the formula's count, and the others keep the template."""
    box = StrangersTemplate(CHATML, process)
    with pytest.raises(TemplateRefusal, match="bytes of messages"):
        box.parts([{"role": "user", "content": "x" * 20_000_000}], [])
    assert process._process is None
    assert box.parts(MESSAGES, [])


def _tokenizer_json(**parts: object) -> dict[str, object]:
    vocabulary = {char: index for index, char in enumerate(map(chr, range(32, 127)))}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": None, "byte_fallback": False}
    return {"version": "1.0", "added_tokens": [], "model": model, **parts}


def _replace(pattern: dict[str, str], content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _padded(strategy: object, **parts: object) -> dict[str, object]:
    padding = {"strategy": strategy, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": " "}
    return {"padding": {**padding, "pad_to_multiple_of": None, **parts}}


def _precompiled(charsmap: str) -> dict[str, object]:
    return {"type": "Precompiled", "precompiled_charsmap": charsmap}


_CUT = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
# What a tokenizer.json may say, and what is wrong with it.
TOKENIZERS: dict[str, dict[str, object]] = {
    "one becomes a million": _tokenizer_json(normalizer=_replace({"String": "x"}, "a" * 1_000_000)),
    "a rare one becomes a million": _tokenizer_json(normalizer=_replace({"String": "\u2603"}, "a" * 1_000_000)),
    "between all": _tokenizer_json(normalizer=_replace({"Regex": ""}, "a" * 1000)),
    "before each": _tokenizer_json(normalizer={"type": "Prepend", "prepend": "a" * 1_000_000}),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_makes_much_of_little_is_refused(name: str, tmp_path: Path) -> None:
    """Refused when it is loaded, before a client's text meets it (30 characters became 30 million tokens)."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(TOKENIZERS[name]))
    begun_s = time.process_time()
    with pytest.raises(UnusableModelFile, match="characters"):
        read_tokenizer_json(path)
    assert time.process_time() - begun_s < 3


_CHARSMAP_OF_ONES = base64.b64encode(b"\xff" * 80).decode()
_LONG_CHARSMAP = base64.b64encode((1024).to_bytes(4, "little") + b"\0" * 1024 + b"a" * 100_000 + b"\0").decode()
# What a tokenizer.json of a few KB says, and of how many tokens "ab" is by it; None where it is refused.
ABORTING: dict[str, tuple[dict[str, object], int | None]] = {
    "padded to a multiple": (_padded("BatchLongest", pad_to_multiple_of=10**12), 2),
    "padded to a length": (_padded({"Fixed": 10**12}), 2),
    "padded to 10 million": (_padded({"Fixed": 10**7}), 2),
    "padded to 3 million, and cut": ({**_padded({"Fixed": 3 * 10**6}), "truncation": _CUT}, 2),
    "cut to one token": ({"truncation": _CUT}, 2),
    "a map that promises a trie of 4 GB": ({"normalizer": _precompiled(_CHARSMAP_OF_ONES)}, None),
    "a map to a long text": ({"normalizer": _precompiled(_LONG_CHARSMAP)}, None),
}
_READ_ALL = """
import pathlib
from litellm_compaction.errors import UnusableModelFile
from litellm_compaction.tokenizers.files import read_tokenizer_json
told = {}
for name in given:
    try:
        told[name] = read_tokenizer_json(pathlib.Path(name)).count("ab")
    except UnusableModelFile:
        told[name] = None
(peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps([told, int(peak.split()[1])]))
"""


@linux
def test_no_tokenizer_ends_the_proxy(tmp_path: Path) -> None:
    """Files that made the library abort are counted by without their padding, or refused; nothing of it costs memory.

    An abort is no exception: the proxy ended at every start (SIGABRT, 2026-11-23).
    """
    paths = {}
    for number, (name, (parts, _)) in enumerate(ABORTING.items()):
        path = tmp_path / str(number) / "tokenizer.json"
        path.parent.mkdir()
        path.write_text(json.dumps(_tokenizer_json(**parts)).replace('"padding"', '"pad\\u0064ing"'))
        paths[str(path)] = name
    told, peak_kb = bounded.in_child(_READ_ALL, list(paths), cpu_s=30)
    assert {paths[path]: tokens for path, tokens in told.items()} == {
        name: tokens for name, (_, tokens) in ABORTING.items()
    }
    assert peak_kb < 200_000


@linux
def test_a_tokenizer_that_died_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would cost each recheck of its file 5 s; a changed file is another one."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(_tokenizer_json(normalizer=_precompiled(_CHARSMAP_OF_ONES))))
    with pytest.raises(UnusableModelFile, match="1 GiB"):
        read_tokenizer_json(path)
    with monkeypatch.context() as patch:
        patch.setattr(files, "Contained", lambda: pytest.fail("it was tried again"))
        with pytest.raises(UnusableModelFile, match="1 GiB"):
            read_tokenizer_json(path)
    path.write_text(json.dumps(_tokenizer_json()))
    assert read_tokenizer_json(path).count("ab") == 2


def test_a_pattern_that_backtracks_is_met_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where the Rust side panics it is not asked again: its text counts by bytes, and stderr stays quiet."""
    path = tmp_path / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": "(q+q+)+$"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(_tokenizer_json(pre_tokenizer=split)))
    found = read_tokenizer_json(path)
    bomb = "q" * 40 + "!"
    counts = {found.count(bomb) for _ in range(2)}
    capfd.readouterr()
    assert found.count(bomb) in counts
    assert capfd.readouterr().err == ""


_SPECIAL = """
import os, pathlib
from litellm_compaction.errors import UnusableModelFile
from litellm_compaction.tokenizers.files import read_tokenizer_json
from litellm_compaction.tokenizers.gguf import read_gguf
folder, told = pathlib.Path(given), {}
for path in sorted(folder.iterdir()):
    for read in (read_tokenizer_json, read_gguf):
        try:
            read(path)
            told[f"{path.name}, {read.__name__}"] = "read"
        except UnusableModelFile:
            told[f"{path.name}, {read.__name__}"] = "refused"
print(json.dumps(told))
"""


@linux
def test_what_is_no_ordinary_file_is_refused(tmp_path: Path) -> None:
    """Devices, pipes, folders, links to them and a file of a terabyte: none is waited for, or read to its end."""
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")
    (tmp_path / "random.gguf").symlink_to("/dev/urandom")
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    with (tmp_path / "sparse.gguf").open("wb") as file:
        file.truncate(2**40)
    with (tmp_path / "begun.gguf").open("wb") as file:
        file.write(b"GGUF\x03\0\0\0" + b"\xff" * 16)
        file.truncate(2**40)
    told = bounded.in_child(_SPECIAL, str(tmp_path), cpu_s=20, memory_mb=1024)
    assert len(told) == 14
    assert set(told.values()) == {"refused"}, told
