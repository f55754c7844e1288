"""Clients that leave in the middle of an answer whose server is far ahead of the proxy: nothing is held afterwards."""

from __future__ import annotations

import json
import math
import re
import socket
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.builders import prose
from tests.integration.bench import Bench, Group, open_bench
from tests.integration.harness import MASTER_KEY
from tests.integration.routes import HAS_PROMETHEUS
from tests.lmstudio_double import ChatCall, Reply

pytestmark = [
    pytest.mark.proxy,
    pytest.mark.skipif(not HAS_PROMETHEUS, reason="prometheus_client is not installed"),
]
_LIMIT_S = 400
# The simulator alone writes the answer in this time; the proxy needs much longer to hand it on.
_ANSWER_TOKENS, _TOKENS_PER_SECOND = 1500, 6000.0
_TEXT = prose("long", _ANSWER_TOKENS)
_LAST_POINT_S, _LAST_POINT_BYTES = 1.2, 160_000
_POINTS = 6


class _Route(NamedTuple):
    path: str
    stream: bool

    @property
    def group(self) -> str:
        return f"{self.path.removeprefix('/v1/').replace('/', '-')}-{'streamed' if self.stream else 'whole'}"

    def body(self, text: str) -> dict[str, Any]:
        asked: dict[str, Any] = {"model": self.group, "stream": self.stream}
        if self.path.endswith("/responses"):
            return {**asked, "input": text, "max_output_tokens": 3000}
        if self.path.endswith("/chat/completions") or self.path.endswith("/messages"):
            return {**asked, "messages": [{"role": "user", "content": text}], "max_tokens": 3000}
        return {**asked, "prompt": text, "max_tokens": 3000}


_PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions")
_ROUTES = [_Route(path, stream) for path, stream in zip(_PATHS, (True, True, False, False), strict=True)]
_ROUTES += [_Route(_PATHS[0], False)]


def _answers(call: ChatCall) -> Reply:
    return Reply(_TEXT if "Write a long text" in call.sent_text else "Fine.")


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A proxy before servers that write ten times as fast as it hands on."""
    simulator = {"tokens_per_second": _TOKENS_PER_SECOND, "chunk_tokens": 1}
    with open_bench(
        tmp_path_factory.mktemp("left"),
        [Group(route.group, 8192, slots=4, simulator=simulator) for route in _ROUTES],
        {},
        process=True,
        litellm_settings={"callbacks": ["prometheus"]},
        router_settings={"num_retries": 0, "disable_cooldowns": True},
    ) as bench:
        yield bench


def _held(bench: Bench) -> tuple[float, float]:
    """The answers and the tokens that the proxy holds."""
    text = bench.proxy.client.get("/metrics/", headers=bench.proxy.headers).text
    answers, tokens = (
        re.search(rf"^litellm_compaction_room_{name} (\S+)$", text, re.MULTILINE) for name in ("answers", "tokens")
    )
    assert answers is not None and tokens is not None  # noqa: PT018
    return float(answers[1]), float(tokens[1])


def _held_in_the_end(bench: Bench) -> tuple[float, float]:
    deadline_s = time.monotonic() + _LIMIT_S
    while (held := _held(bench)) != (0, 0) and time.monotonic() < deadline_s:
        # Another process gives it back: there is nothing to wait for but the next look.
        time.sleep(0.2)
    return held


def _leave(bench: Bench, route: _Route, text: str, *, after_s: float, after_bytes: float = math.inf) -> None:
    """Asks, reads for a while or so much, and closes the socket."""
    port = int(bench.proxy.base_url.rpartition(":")[2])
    content = json.dumps(route.body(f"Write a long text {text}.")).encode()
    head = (
        f"POST {route.path} HTTP/1.1\r\nHost: proxy\r\nAuthorization: Bearer {MASTER_KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    until_s = time.monotonic() + after_s
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(head.encode() + content)
        read_bytes = 0
        while read_bytes < after_bytes and (left_s := until_s - time.monotonic()) > 0:
            client.settimeout(left_s)
            try:
                piece = client.recv(4096)
            except TimeoutError:
                return
            if not piece:
                return
            read_bytes += len(piece)


@pytest.mark.parametrize("route", _ROUTES, ids=lambda route: route.group)
def test_client_that_leaves_at_any_point_gives_all_back(fast: Bench, route: _Route) -> None:
    """At each of so many points of an answer; the next request is served, and nothing is held."""
    watch = fast.watch(route.group, _answers)
    for point in range(_POINTS):
        part = (point + 1) / _POINTS
        if route.stream:
            _leave(fast, route, f"{route.group} {point}", after_s=_LIMIT_S, after_bytes=part * _LAST_POINT_BYTES)
        else:
            _leave(fast, route, f"{route.group} {point}", after_s=part * _LAST_POINT_S)
    answer = fast.proxy.post(route.body("Hi.") | {"stream": False}, route.path)
    assert answer.status_code == 200, answer.text
    assert "Fine." in answer.text
    assert _held_in_the_end(fast) == (0, 0)
    if route.stream:
        assert sum(record.path.endswith("completions") for record in watch.records) > _POINTS
