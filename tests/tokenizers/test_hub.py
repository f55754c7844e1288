"""Downloads of tokenizers: only where they are allowed, each once, and never in the way of a request."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.config import settings_from
from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.errors import ConfigError, UnusableModelFile
from litellm_compaction.tokenizers.hub import Hub
from litellm_compaction.tokenizers.model_files import ModelFiles
from litellm_compaction.tokenizers.sources import Sources, TokenizerSource, check_tokenizer
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.lmstudio import WantedModel
from litellm_compaction.windows.windows import Target
from tests.tokenizers.vocabulary_files import write_pack_gguf, write_tokenizer_json

UNKNOWN = WantedModel(key="falcon-h9", publisher="tiiuae")


def target(model: str = "falcon-h9", tokenizer: str = "") -> Target:
    # On another machine, so that no file of it can be here.
    api_base = "http://192.0.2.7:1234/v1"
    return Target(key=model, model=model, api_base=api_base, api_key=None, context_length=None, tokenizer=tokenizer)


class Fetch:
    """A hub on a string."""

    def __init__(self, result: Path | Exception) -> None:
        self.result = result
        self.asked: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, repository: str) -> Path:
        self.asked.append(repository)
        assert self.gate.wait(60)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a download leaves: one token per byte, Qwen's template."""
    return write_tokenizer_json(tmp_path / "snapshot", "qwen2.5")


def allowed(fetch: Fetch, **options: Any) -> Sources:
    return Sources(hub=Hub(fetch), downloads=True, **options)


async def source_of(found: Sources, model: Target, wanted: WantedModel | None = UNKNOWN) -> TokenizerSource:
    return await found.source(model, "", wanted, patient=True)


async def test_nothing_is_downloaded_unasked(folder: Path) -> None:
    """Off by default: an unknown model has its stand-in."""
    fetch = Fetch(folder)
    assert (await source_of(Sources(hub=Hub(fetch)), target())).kind == "stand_in"
    assert fetch.asked == []
    assert settings_from({}).tokenizer_download is False


async def test_an_unknown_model_is_looked_for_by_its_own_name(folder: Path) -> None:
    """Under the publisher and name that LM Studio lists, once for all who ask; then it counts exactly."""
    fetch = Fetch(folder)
    found = allowed(fetch)
    first, second = await asyncio.gather(source_of(found, target()), source_of(found, target()))
    assert fetch.asked == ["tiiuae/falcon-h9"]
    assert (first.kind, first.template, first.family.exact) == ("download", "file", True)
    assert first == second
    assert first.path == folder / "tokenizer.json"
    asked = Request(messages=(parse_message({"role": "user", "content": "Grüße"}),))
    assert (await TokenCounter().count("t", first.family, asked)).exact


@pytest.mark.parametrize(
    ("model", "wanted", "repository"),
    [
        ("org/name", None, None),
        ("x", WantedModel(key="org/name", publisher="other"), "org/name"),
        ("x", WantedModel(key="name"), None),
        ("x", WantedModel(key="../name"), None),
        ("x", WantedModel(key="a/b/c"), None),
        ("x", WantedModel(key="na me", publisher="org"), None),
    ],
)
async def test_only_names_of_repositories_are_asked_for(
    folder: Path, model: str, wanted: WantedModel | None, repository: str | None
) -> None:
    """What LM Studio calls a model never becomes any other address; what clients call it is never asked for."""
    fetch = Fetch(folder)
    await source_of(allowed(fetch), target(model), wanted)
    assert fetch.asked == ([repository] if repository else [])


async def test_what_this_package_has_is_not_downloaded(folder: Path) -> None:
    """A pack comes before a download, and so does the operator's word."""
    fetch = Fetch(folder)
    found = allowed(fetch)
    assert (await source_of(found, target("qwen/qwen3-8b"), WantedModel(key="qwen/qwen3-8b"))).kind == "pack"
    assert (await source_of(found, target(tokenizer="heuristic"))).kind == "heuristic"
    assert (await source_of(found, target(tokenizer="llama-3.1-8b"))).kind == "operator"
    assert fetch.asked == []


async def test_lm_studios_own_file_comes_first(folder: Path, tmp_path: Path) -> None:
    """What is on this machine already is not downloaded."""
    write_pack_gguf(tmp_path / "models" / "tiiuae" / "falcon-h9-GGUF" / "falcon-h9-Q4_K_M.gguf", "qwen2", "qwen3")
    fetch = Fetch(folder)
    found = allowed(fetch, files=ModelFiles(tmp_path / "models", home=tmp_path / "home"), is_folder_given=True)
    assert (await source_of(found, target())).kind == "lm_studio_file"
    assert fetch.asked == []


async def test_an_operator_names_a_repository(folder: Path) -> None:
    """That is leave enough, for a known family too; the template comes from there as well."""
    fetch = Fetch(folder)
    found = await source_of(Sources(hub=Hub(fetch)), target("qwen3-8b", tokenizer="hf:Org/Qwen-Custom"))
    assert (found.kind, found.template, fetch.asked) == ("download", "file", ["Org/Qwen-Custom"])


async def test_no_request_waits_for_a_download(folder: Path) -> None:
    """The stand-in counts meanwhile; afterwards the download does."""
    fetch = Fetch(folder)
    fetch.gate.clear()
    found = allowed(fetch, wait_s=0.01)
    assert (await found.source(target(), "", UNKNOWN)).kind == "stand_in"
    fetch.gate.set()
    assert (await source_of(found, target())).kind == "download"
    assert (await found.source(target(), "", UNKNOWN)).kind == "download"
    assert fetch.asked == ["tiiuae/falcon-h9"]


async def test_a_failure_is_told_once_and_not_tried_for_a_while() -> None:
    """One warning with what to do, for all requests and all rechecks of an hour; the stand-in counts."""
    now_s = [0.0]
    fetch = Fetch(UnusableModelFile("hf:tiiuae/falcon-h9", "there is no such repository", advice="Write another."))
    told: list[str] = []
    hub = Hub(fetch, clock=lambda: now_s[0])
    found = Sources(hub=hub, downloads=True, on_failure=told.append, clock=lambda: now_s[0])
    for at_s in (0.0, 61.0, 3000.0):
        now_s[0] = at_s
        made = await source_of(found, target())
        assert made.kind == "stand_in"
        assert made.failures == ("hf:tiiuae/falcon-h9: there is no such repository. Write another.",)
    assert (len(fetch.asked), len(told)) == (1, 1)
    now_s[0] = 3700.0
    await source_of(found, target())
    assert (len(fetch.asked), len(told)) == (2, 1)


async def test_a_download_that_hangs_is_given_up(folder: Path) -> None:
    """The request that was patient gets the stand-in; the thread goes on, and is not started twice."""
    now_s = [0.0]
    fetch = Fetch(folder)
    fetch.gate.clear()
    hub = Hub(fetch, limit_s=0.02, clock=lambda: now_s[0])
    for at_s in (0.0, 301.0):
        now_s[0] = at_s
        with pytest.raises(UnusableModelFile, match=r"not there after 0\.02 s"):
            await hub.folder("a/b")
    assert fetch.asked == ["a/b"]
    fetch.gate.set()
    now_s[0] = 602.0
    hub._limit_s = 30.0
    assert await hub.folder("a/b") == folder


async def test_a_damaged_download_is_a_failure(tmp_path: Path) -> None:
    """What came is no tokenizer: named, and the stand-in counts."""
    (tmp_path / "tokenizer.json").write_text("<html>Sign in</html>")
    made = await source_of(allowed(Fetch(tmp_path), on_failure=lambda _: None), target())
    assert made.kind == "stand_in"
    assert "no tokenizer.json" in made.failures[0]


@pytest.mark.parametrize("value", ["hf:", "hf:name", "hf:a/b/c", "hf:https://x/y", "hf:../x"])
def test_a_wrong_repository_is_found_at_start(value: str) -> None:
    """Without asking anybody."""
    with pytest.raises(ConfigError, match="organisation/name"):
        check_tokenizer(value, "tokenizer")
    check_tokenizer("hf:org/name", "tokenizer")


@dataclass
class FakeHub:
    """Hugging Face on this machine, as far as `huggingface_hub` asks it."""

    files: dict[str, bytes] = field(default_factory=dict)
    status: int = 404
    error: str = "RepoNotFound"
    asked: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def fake_hub(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            body = hub.files.get(self.path.removeprefix("/org/name/resolve/main/"))
            if body is None:
                self.send_response(404 if hub.files else hub.status)
                self.send_header("X-Error-Code", "EntryNotFound" if hub.files else hub.error)
                # Without it `huggingface_hub` takes a missing file for a missing repository.
                self.send_header("X-Repo-Commit", "c0ffee")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("X-Repo-Commit", "c0ffee" * 6 + "c0ff")
            self.send_header("ETag", f'"{hash(body)}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Not on the test's terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def fetched(endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    """What a process that has the endpoint in its environment gets: `huggingface_hub` reads it when imported."""
    script = (
        "from litellm_compaction.tokenizers.hub import fetch_files\n"
        "from litellm_compaction.errors import CompactionError\n"
        "try:\n    print(fetch_files('org/name'))\n"
        "except CompactionError as error:\n    print('ERROR', type(error).__name__, error)\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environ |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=300)


def test_the_files_come_over_the_wire_once(tmp_path: Path, folder: Path) -> None:
    """Tokenizer, configuration and template lie in one folder; a later process asks nobody, online or not."""
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    with fake_hub(FakeHub(files)) as hub:
        first = fetched(hub.url, tmp_path / "home")
        place = Path(first.stdout.strip())
        assert {name: (place / name).read_bytes() for name in files} == files, first.stderr
        assert "tokenizer.json" in files
        asked = len(hub.asked)
        assert fetched(hub.url, tmp_path / "home").stdout == first.stdout
        assert len(hub.asked) == asked
    assert fetched(hub.url, tmp_path / "home").stdout == first.stdout
    assert first.stderr == ""


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (404, "RepoNotFound", "there is no such repository, or it is private"),
        (403, "GatedRepo", "its owner wants to be asked first. Accept its terms"),
        (500, "", "it cannot be had (HfHubHTTPError)"),
    ],
)
def test_every_no_says_what_to_do(tmp_path: Path, status: int, error: str, words: str) -> None:
    """Missing, gated, out of order."""
    with fake_hub(FakeHub(status=status, error=error)) as hub:
        said = fetched(hub.url, tmp_path).stdout
    assert said.startswith("ERROR")
    assert words in said
    assert "Set `tokenizer:`" in said or "HF_TOKEN" in said


def test_a_repository_without_tokenizer_and_no_server(tmp_path: Path) -> None:
    """Two more ways to have nothing."""
    with fake_hub(FakeHub({"tokenizer_config.json": json.dumps({}).encode()})) as hub:
        assert "it has no tokenizer.json. Write another repository" in fetched(hub.url, tmp_path).stdout
    assert "_NoAnswer hf:org/name:" in fetched(hub.url, tmp_path / "other").stdout
