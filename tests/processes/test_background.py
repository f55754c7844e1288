"""The record of the next compaction, while a proxy ends and beside another one."""

from __future__ import annotations

from typing import Any

from tests.builders import talk
from tests.integration.bench import SUMMARY, Group, answers, open_bench
from tests.integration.harness import proxy
from tests.lmstudio_double import Gate, Reply

_WINDOW = 8192
# Over 60 % of it, and under the trigger.
_FILLED = 5200


def test_the_proxy_ends_in_the_middle_of_it(tmp_path: Any) -> None:
    """The call is closed with the process, and no task is left that anybody could complain about."""
    gate = Gate()
    with open_bench(tmp_path, [Group("ending", _WINDOW)], {"background": "idle"}, process=True) as bench:
        watch = bench.watch("ending", answers(Reply(SUMMARY, gate=gate)))
        bench.proxy.chat("ending", talk("ending", _FILLED))
        assert gate.reached.wait(60)
        assert bench.proxy.process is not None
        bench.proxy.process.terminate()
        bench.proxy.process.wait(60)
        bench.simulators["ending"].wait_until(lambda: watch.summaries[0].disconnected_s is not None)
        gate.open()
    told = "\n".join(bench.proxy.lines)
    for complaint in ("Task was destroyed", "never retrieved", "never awaited", "Traceback"):
        assert complaint not in told


def test_who_comes_to_another_proxy_has_the_engine_too(tmp_path: Any) -> None:
    """In a context that their answers share two proxies see each other: the call of the one is ended for the other."""
    gate = Gate()
    with open_bench(tmp_path, [Group("shared", _WINDOW)], {"background": "idle"}, process=True) as bench:
        watch = bench.watch("shared", answers(Reply(SUMMARY, gate=gate)))
        with proxy(tmp_path / "config.yaml") as second:
            bench.proxy.chat("shared", talk("shared", _FILLED))
            assert gate.reached.wait(60)
            answer = second.chat("shared", [{"role": "user", "content": "Hello."}])
            assert answer.json()["choices"][0]["message"]["content"] == "Understood."
            bench.simulators["shared"].wait_until(lambda: watch.summaries[0].disconnected_s is not None)
            gate.open()
