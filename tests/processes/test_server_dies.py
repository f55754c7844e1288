"""What clients read when LM Studio ends after its window was read, so that only the request itself finds it gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.integration.bench import KEY, Bench, Group, open_bench
from tests.lmstudio_double import serve

pytestmark = pytest.mark.proxy

ROUTES = {
    "chat": ("/v1/chat/completions", "messages"),
    "messages": ("/v1/messages", "messages"),
    "responses": ("/v1/responses", "input"),
    "completions": ("/v1/completions", "prompt"),
}
HELLO = [{"role": "user", "content": "Hello."}]
START_IT = "Start its server (lms server start) or correct api_base."


CASES = [("chat", True), ("messages", False), ("responses", True), ("completions", False)]


@pytest.fixture(scope="module")
def dying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A proxy before LM Studios that have ended since their windows were read."""
    with ExitStack() as stack, ExitStack() as servers:

        def entry(name: str) -> dict[str, Any]:
            # Without LM Studio's own protocol, whose socket would tell at once that it has ended.
            address = servers.enter_context(serve(Group(name, 4096, speaks=False).make()))
            params = {"model": f"lm_studio/{KEY}", "api_base": f"{address.base_url}/v1", "api_key": "k"}
            return {"model_name": name, "litellm_params": params}

        bench = stack.enter_context(
            open_bench(
                tmp_path_factory.mktemp("dying"),
                [Group("local", 4096)],
                {"window_cache_s": 3600},
                entries=[entry(name) for name in ROUTES],
                # With retries the second attempt would find it out before it is sent.
                router_settings={"num_retries": 0},
                process=True,
            )
        )
        for name in ROUTES:
            assert bench.proxy.chat(name, HELLO).status_code == 200
        servers.close()
        yield bench


@pytest.mark.parametrize(("name", "stream"), CASES)
def test_server_that_ended_is_named_as_such(dying: Bench, name: str, stream: bool) -> None:
    """The client learns what to do, the log where; LiteLLM's own lines and tracebacks of it are left out."""
    path, key = ROUTES[name]
    since = len(dying.proxy.lines)
    body: dict[str, Any] = {"model": name, key: "Hello." if key == "prompt" else HELLO, "max_tokens": 100}
    answer = dying.proxy.post({**body, "stream": stream}, path)
    # What this asks for is served, and its line comes after all of theirs.
    dying.proxy.chat("local", HELLO)
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["message"] == f"LM Studio does not answer. {START_IT}"
    said = [line for line in dying.proxy.lines[since:] if line.strip() and "INFO" not in line]
    (line,) = said
    assert f"litellm_compaction:WARNING: refused model={name}: LM Studio at http://127.0.0.1:" in line
    assert line.endswith(f"/v1 does not answer. {START_IT}")
