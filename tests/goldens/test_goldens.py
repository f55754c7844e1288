"""What a server is asked and a client reads in ten conversations, as text: a change shows what changed.

`GOLDENS=write pytest tests/goldens` writes the files anew; their diff belongs into the commit that changes them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.goldens.scenes import Scene, scenes, shown, work
from tests.integration.bench import Bench, open_bench
from tests.integration.harness import Streamed
from tests.lmstudio_double import RequestRecord

_FOLDER = Path(__file__).parent
_SCENES = {scene.name: scene for scene in scenes()}
# What is made up anew in each run, in JSON, and the name of a record.
_IDS = re.compile(r'("(?:id|item_id|response_id|call_id|tool_call_id|tool_use_id)": ?)"[^"]*"')
_TIMES = re.compile(r'("(?:created|created_at|completed_at)": ?)[0-9.]+')
_HEADERS = re.compile(r"x-litellm-compaction(?!-(?:record|digest)$)")
# The messages that the scenes share, by their text: their places in `scenes.work`.
_WORK = {f"[{message['role']}]\n{message['content']}": f"work {place}" for place, message in enumerate(work(27), 1)}
_NUMBER = re.compile(r"\d+")
# Whose file the others are shown against: most of what a compaction asks for stands in it.
_FIRST = "compacted-and-reused"
_MESSAGE = re.compile(r"^\[(?:system|user|assistant|tool)\]\n", re.MULTILINE)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A deployment and a server for each scene: what one teaches is no other's."""
    settings = {"window_cache_s": 600, "heartbeat_s": 600, "ask_server": False}
    groups = [scene.group for scene in _SCENES.values()]
    with open_bench(tmp_path_factory.mktemp("goldens"), groups, settings) as opened:
        yield opened


@pytest.mark.parametrize("name", _SCENES)
def test_the_conversation_is_as_recorded(bench: Bench, name: str) -> None:
    """The same requests go upstream, and the client reads the same answers."""
    seen, file = _played(bench, _SCENES[name]), _FOLDER / f"{name}.txt"
    if os.environ.get("GOLDENS") == "write":
        file.write_text(seen, encoding="utf-8")
    assert seen == file.read_text(encoding="utf-8")


def test_every_recorded_conversation_is_played() -> None:
    """A file without a scene would be compared with nothing."""
    others = {"answers", "asked", "counts", "decisions", "searches", "seats"}
    assert {path.stem for path in _FOLDER.glob("*.txt")} == {*_SCENES} | others


def _played(bench: Bench, scene: Scene) -> str:
    parts: list[str] = []
    known = dict(_WORK)
    for number, body in enumerate(scene.bodies, 1):
        watch = bench.watch(scene.name, scene.script)
        answer = bench.proxy.stream_body(
            {"model": scene.name, **body, "stream": scene.stream}, scene.path, **scene.headers
        )
        how = "streamed" if scene.stream else "whole"
        parts.append(f"==== client {number}: POST {scene.path}, {how}\n{_named(shown(body), known)}")
        posts = [record for record in watch.records if record.method == "POST"]
        parts += [_upstream(place, record, known) for place, record in enumerate(posts, 1)]
        parts.append(f"==== client {number} reads {answer.status}\n{_read(answer)}")
    lines = _folded(_steady("\n\n".join(parts)).splitlines())
    before = "" if scene.name == _FIRST else (_FOLDER / f"{_FIRST}.txt").read_text(encoding="utf-8")
    return _said_once(lines, before.splitlines())


def _upstream(place: int, record: RequestRecord, known: dict[str, str]) -> str:
    return f"==== server {place}: POST {record.path}, {record.outcome}\n{_named(shown(record.body or {}), known)}"


def _named(text: str, known: dict[str, str]) -> str:
    """The text, with each message that was shown before by its name, and a run of these as its two ends."""
    starts = [match.start() for match in _MESSAGE.finditer(text)] + [len(text)]
    lines = [text[: starts[0]].rstrip()]
    run: list[str] = []
    for begin, end in itertools.pairwise(starts):
        message = text[begin:end].rstrip()
        if message in known:
            run.append(known[message])
            continue
        lines += _run(run)
        run = []
        known[message] = f"message {len(known) - len(_WORK) + 1}"
        role, _, words = message.partition("\n")
        lines.append(f"{role} {known[message]}\n{words}")
    return "\n".join(lines + _run(run))


def _run(names: list[str]) -> list[str]:
    return [f"[as before] {names[0]}{f' … {names[-1]}, {len(names)} messages' if names[1:] else ''}"] if names else []


def _read(answer: Streamed) -> str:
    headers = [f"{name}: {value}" for name, value in sorted(answer.headers.items()) if _HEADERS.match(name)]
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        body = "\n".join(_events(answer.lines))
    else:
        fields = json.loads(answer.raw).items()
        body = "\n".join(json.dumps({name: value}, ensure_ascii=False) for name, value in fields)
    return "\n".join([*headers, "", body])


def _events(lines: list[str]) -> Iterator[str]:
    """Each event in a line; the deltas of a text that follow each other as one."""
    pending = ""
    for line in lines:
        delta = _text_delta(line)
        if delta:
            pending += delta
            continue
        if pending:
            yield json.dumps(pending, ensure_ascii=False)
            pending = ""
        if not line.startswith("event:"):
            yield line.removeprefix("data: ")
    if pending:
        yield json.dumps(pending, ensure_ascii=False)


def _text_delta(line: str) -> str:
    """The text of an event that has nothing else to say."""
    if not line.startswith("data: {"):
        return ""
    event: Mapping[str, Any] = json.loads(line[6:])
    if event.get("type") in ("content_block_delta", "response.output_text.delta"):
        delta = event["delta"]
        return str(delta if isinstance(delta, str) else delta.get("text") or "")
    choice = (event.get("choices") or [{}])[0]
    said = {name: value for name, value in (choice.get("delta") or {}).items() if value}
    return str(said["content"]) if set(said) == {"content"} and not choice.get("finish_reason") else ""


def _steady(text: str) -> str:
    """Without what is made up anew in each run; messages that the scenes share by their names."""
    for message, name in _WORK.items():
        text = text.replace(message.partition("\n")[2], f"({name})")
    lines = []
    for _, group in itertools.groupby(text.splitlines(), lambda line: re.sub(r"\d+", "0", line)):
        same = list(group)
        lines += same if len(same) < 4 else [same[0], f"(… {len(same) - 2} such lines …)", same[-1]]
    return _TIMES.sub(r"\g<1>0", _IDS.sub(r'\g<1>"…"', "\n".join(lines)))


def _folded(lines: list[str]) -> list[str]:
    """Some lines that come again and again with each number a step further, by the first and the last of them."""
    folded: list[str] = []
    while lines:
        size, times = max(((size, _times(lines, size)) for size in range(1, 8)), key=lambda each: each[0] * each[1])
        if times < 4:
            folded.append(lines.pop(0))
            continue
        folded += [*lines[:size], f"(… {times - 2} times so …)", *lines[size * (times - 1) : size * times]]
        lines = lines[size * times :]
    return folded


def _times(lines: list[str], size: int) -> int:
    """How often the first `size` lines come one after the other."""
    blocks = ["\n".join(lines[at : at + size]) for at in range(0, len(lines) - size + 1, size)]
    shape, steps = _NUMBER.sub("0", blocks[0]) if blocks else "", None
    for place, (before, block) in enumerate(itertools.pairwise(blocks), 1):
        numbers = zip(map(int, _NUMBER.findall(before)), map(int, _NUMBER.findall(block)), strict=False)
        step = [now - then for then, now in numbers]
        if _NUMBER.sub("0", block) != shape or step != (steps or step):
            return place
        steps = step
    return len(blocks)


def _said_once(lines: list[str], before: list[str]) -> str:
    """The text, in which lines that stood in it or `before` it in this order are named by the first and the last."""
    said = [*before]
    while lines:
        same = max((_in_common(said[at:], lines) for at, line in enumerate(said) if line == lines[0]), default=0)
        if same < 4:
            said.append(lines.pop(0))
            continue
        first, *_, last = filter(None, lines[:same])
        said.append(f"(… {same} lines as before, from {first[:40]!r} to {last[:40]!r} …)")
        lines = lines[same:]
    return "\n".join(said[len(before) :]) + "\n"


def _in_common(one: list[str], other: list[str]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
