"""The recorded bytes of about sixty conversations, upstream and to the client, through a real proxy.

`GOLDENS=write pytest tests/goldens` records anew, which only a change of behaviour may need; `GOLDENS_FOLDER` names a
folder for the whole of what went over the wire, to be compared with another checkout's.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.simulator import RequestRecord
from tests.goldens.scenes import ROUTES, Scene, scenes
from tests.integration.bench import Bench, open_bench

pytestmark = pytest.mark.proxy

_RECORDED = Path(__file__).with_name("recorded.json")
_IS_WRITTEN = os.environ.get("GOLDENS") == "write"
# Conversations are dear to write: every process of pytest collects this file, one runs it.
_NAMES = [scene.name for scene in scenes()] if _IS_WRITTEN else list(json.loads(_RECORDED.read_text(encoding="utf-8")))
# What LiteLLM and the simulator make up anew in each run.
_IDS = re.compile(r'("(?:id|item_id|response_id|call_id|tool_call_id|system_fingerprint)": ?)"[^"]*"')
_TIMES = re.compile(r'("(?:created|created_at|completed_at)": ?)[0-9.]+')


@pytest.fixture(scope="module")
def written() -> dict[str, Scene]:
    """All scenes, by their names."""
    return {scene.name: scene for scene in scenes()}


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory, written: dict[str, Scene]) -> Iterator[dict[str, Bench]]:
    """A proxy for each carrier, with a deployment and a server for each scene: what one teaches is no other's."""
    with ExitStack() as stack:
        opened: dict[str, Bench] = {}
        for carrier in ("auto", "hooks"):
            opened[carrier] = stack.enter_context(
                open_bench(
                    tmp_path_factory.mktemp(f"goldens-{carrier}"),
                    [scene.group for scene in written.values() if scene.carrier == carrier],
                    {"carrier": carrier, "window_cache_s": 600, "heartbeat_s": 600, "ask_server": "off"},
                    router_settings={"num_retries": 0, "disable_cooldowns": True},
                )
            )
        yield opened


@pytest.fixture(scope="module")
def recorded() -> Iterator[dict[str, Any]]:
    """What was recorded of each scene; written anew at the end where that is asked for."""
    found: dict[str, Any] = {} if _IS_WRITTEN else json.loads(_RECORDED.read_text(encoding="utf-8"))
    yield found
    if _IS_WRITTEN:
        _RECORDED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@pytest.mark.parametrize("name", _NAMES)
def test_bytes_are_as_recorded(
    benches: dict[str, Bench], recorded: dict[str, Any], written: dict[str, Scene], name: str
) -> None:
    """The same requests go upstream, and the same answers to the client, as when the scene was recorded."""
    scene = written[name]
    bench = benches[scene.carrier]
    watch = bench.watch(scene.name, scene.script)
    client = [_asked(bench, scene, body) for body in scene.bodies]
    upstream = [_upstream(record) for record in watch.records if record.method == "POST"]
    _kept(scene, {"upstream": upstream, "client": client})
    seen = {"upstream": [_shape(each) for each in upstream], "client": [_shape(each) for each in client]}
    if _IS_WRITTEN:
        recorded[scene.name] = seen
    assert seen == recorded[scene.name]


def test_nothing_is_recorded_of_what_is_not_asked(recorded: Mapping[str, Any], written: dict[str, Scene]) -> None:
    """The file and the scenes belong together, and there are enough of them."""
    assert sorted(recorded) == sorted(written) == sorted(_NAMES)
    assert len(written) >= 50


def _asked(bench: Bench, scene: Scene, body: Mapping[str, Any]) -> dict[str, Any]:
    answer = bench.proxy.stream_body(
        {"model": scene.name, **body, "stream": scene.stream}, ROUTES[scene.route], **scene.headers
    )
    headers = {key: value for key, value in answer.headers.items() if key.startswith("x-litellm-compaction")}
    return {"status": answer.status, "headers": headers, "bytes": _steady(answer.raw.decode())}


def _upstream(record: RequestRecord) -> dict[str, Any]:
    body = record.body or {}
    return {
        "path": record.path,
        "roles": " ".join(str(message.get("role"))[0] for message in body.get("messages") or ()),
        "max_tokens": body.get("max_tokens"),
        "bytes": _steady(json.dumps(body, sort_keys=True)),
    }


def _steady(text: str) -> str:
    """Without what is made up anew in each run."""
    return _TIMES.sub(r"\g<1>0", _IDS.sub(r'\g<1>""', text))


def _shape(part: Mapping[str, Any]) -> dict[str, Any]:
    """Enough to see what has changed; the bytes themselves as a digest."""
    text = part["bytes"]
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {**{key: value for key, value in part.items() if key != "bytes"}, "chars": len(text), "sha256": digest}


def _kept(scene: Scene, seen: Mapping[str, Any]) -> None:
    if folder := os.environ.get("GOLDENS_FOLDER"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"{scene.name}.json"
        path.write_text(json.dumps(seen, indent=1, ensure_ascii=False), encoding="utf-8")
