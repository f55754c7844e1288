"""Two real proxies with data folders of their own, as on two machines, over one Redis."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from litellm_compaction.stores import open_store
from tests.builders import ONE_ROUND, answered, talk
from tests.integration.bench import KEY, answers, is_summary_call, overrun
from tests.integration.harness import MASTER_KEY, Proxy, lm_studio, proxy, until, write_config
from tests.integration.page_forms import chosen, look, save
from tests.lmstudio_double import Model, RequestRecord, Simulator, serve
from tests.stores.servers import Server, any_program, running

pytestmark = pytest.mark.proxy

PASSWORD = "hunter2-of-redis"
DEPLOY = Path(__file__).parents[2] / "deploy"
HI = [{"role": "user", "content": "Hi."}]


@dataclass
class Machines:
    """The two proxies, what they share, and what the simulated LM Studio was asked."""

    one: Proxy
    two: Proxy
    redis: Server
    simulator: Simulator
    base_url: str
    _seen: int = field(default=0)

    def asked(self) -> list[RequestRecord]:
        """The requests since the last look."""
        new = self.simulator.requests[self._seen :]
        self._seen += len(new)
        assert not [problem for record in new if (problem := overrun(record))]
        return new

    def summaries(self) -> int:
        """How many summaries were written since the last look."""
        return sum(is_summary_call(record.body) for record in self.asked())


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    simulator = Simulator([Model(KEY)])
    simulator.script = answers()
    simulator.load(KEY, 8192)
    with ExitStack() as stack:
        base_url = stack.enter_context(serve(simulator)).base_url
        redis = stack.enter_context(running(any_program(), "--requirepass", PASSWORD))
        proxies = []
        # One reuses the proxy's own Redis, the other names it; passwords come from the environment.
        variables = {
            "redis": {"REDIS_HOST": "127.0.0.1", "REDIS_PORT": str(redis.port), "REDIS_PASSWORD": PASSWORD},
            "os.environ/SHARED_STORE": {"SHARED_STORE": f"redis://:{PASSWORD}@127.0.0.1:{redis.port}/0"},
        }
        for store, environ in variables.items():
            folder = tmp_path_factory.mktemp("machine")
            config = write_config(folder, [lm_studio("local", KEY, base_url)], {"window_cache_s": 600, "store": store})
            proxies.append(stack.enter_context(proxy(config, **environ)))
        yield Machines(*proxies, redis, simulator, base_url)


@pytest.fixture(autouse=True)
def _no_secret_is_logged(machines: Machines) -> Iterator[None]:
    """Whatever a test does to the server."""
    yield
    for running_proxy in (machines.one, machines.two):
        assert not running_proxy.logged(PASSWORD)
        assert not running_proxy.logged("failed_open")


def outcome(answer: httpx.Response) -> str:
    """What was done for a request, as its answer's header says."""
    answer.raise_for_status()
    found: str = answer.headers["x-litellm-compaction"]
    return found


def next_turn(messages: list[dict[str, Any]], answer: httpx.Response) -> list[dict[str, Any]]:
    return answered(messages, answer.json()["choices"][0]["message"]["content"], "Go on.")


def is_guarded(machine: Proxy) -> bool:
    return "x-litellm-compaction" in machine.chat("local", HI, max_tokens=16).headers


def test_a_change_and_the_history_are_everybodys(machines: Machines) -> None:
    """What an operator changes on one machine's page holds on the other; both pages show one history."""
    assert outcome(machines.one.chat("local", talk("history", ONE_ROUND), max_tokens=32)) == "compacted"
    one, two = (look(each, "events", MASTER_KEY) for each in (machines.one, machines.two))
    assert one.text == two.text
    assert one.json()["events"]
    told = look(machines.one, key=MASTER_KEY)
    assert told.json()["notices"] == []
    assert PASSWORD not in told.text
    assert save(machines.one, {"mode": "observe"}, MASTER_KEY).status_code == 200
    until(lambda: not is_guarded(machines.two))
    assert chosen(machines.two, MASTER_KEY)["mode"] == "observe"
    assert save(machines.two, {"mode": None}, MASTER_KEY).status_code == 200
    until(lambda: is_guarded(machines.one))


@pytest.mark.parametrize("kind", ["slow", "gone"])
def test_requests_go_on_while_the_redis_does_not_answer(machines: Machines, kind: str) -> None:
    """In the memory of each proxy, told once; when it is back, what was compacted meanwhile is the other's, too."""
    assert is_guarded(machines.one)
    kept = records(machines)
    machines.redis.kill() if kind == "gone" else machines.redis.signal(signal.SIGSTOP)
    messages = talk(f"during an outage, {kind}", ONE_ROUND)
    machines.asked()
    first = machines.one.chat("local", messages, max_tokens=32)
    assert outcome(first) == "compacted"
    messages = next_turn(messages, first)
    assert outcome(machines.one.chat("local", messages, max_tokens=32)) == "reused"
    assert machines.summaries() == 1
    # Nobody waits until a stopped server is given up; a second outage in the same minute is not told.
    failed = machines.one.expect_logged("store_failed")
    machines.redis.start() if kind == "gone" else machines.redis.signal(signal.SIGCONT)
    left = 0 if kind == "gone" else kept
    until(lambda: is_guarded(machines.one) and records(machines) == left + 1)
    until(lambda: "The store cannot be read" not in look(machines.two, key=MASTER_KEY).text)
    machines.asked()
    assert outcome(machines.two.chat("local", messages, max_tokens=16)) == "reused"
    assert machines.summaries() == 0

    # Whoever asks next comes to know: a write that a stopped server had received is done before.
    def is_told() -> bool:
        # A short conversation asks the store for nothing.
        outcome(machines.one.chat("local", messages, max_tokens=16))
        return len(machines.one.logged("store_recovered")) == len(failed)

    until(is_told)
    assert machines.one.logged("store_failed") == failed


def records(machines: Machines) -> int:
    """How many compactions are in the Redis, as an operator's command sees it."""
    url = machines.redis.url.replace("127", f":{PASSWORD}@127", 1)

    async def count() -> int:
        store = open_store(url, ttl_s=1e9, max_bytes=1_000_000, secret=lambda: MASTER_KEY, is_proxy=False)
        try:
            return len(await store.compactions())
        finally:
            await store.aclose()

    return asyncio.run(count())


def test_the_deployments_configuration_runs(machines: Machines, tmp_path: Path) -> None:
    """deploy/config.yaml as compose starts it: it compacts into the Redis, and Prometheus sees what it asks for."""
    shutil.copy(DEPLOY / "config.yaml", tmp_path)
    environ = {"REDIS_HOST": "127.0.0.1", "REDIS_PORT": str(machines.redis.port), "REDIS_PASSWORD": PASSWORD}
    kept = records(machines)
    with proxy(tmp_path / "config.yaml", LM_STUDIO_API_BASE=f"{machines.base_url}/v1", **environ) as running_proxy:
        answer = running_proxy.chat(f"lm_studio/{KEY}", talk("deployed", ONE_ROUND), max_tokens=32)
        assert outcome(answer) == "compacted"
        until(lambda: records(machines) == kept + 1)
        shown = running_proxy.client.get("/metrics/")
        assert shown.status_code == 200
        board = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
        asked = {name for panel in board["panels"] for name in re.findall(r"litellm_\w+", panel["targets"][0]["expr"])}
        types = set(re.findall(r"^# TYPE (\w+)", shown.text, re.MULTILINE))
        missing = {name for name in asked if not {name, name.rpartition("_")[0]} & types}
        assert not missing
