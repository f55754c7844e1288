"""The record of the next compaction, while a proxy ends and beside another one."""

from __future__ import annotations

from typing import Any

from tests.builders import talk
from tests.integration.bench import SUMMARY, Group, answers, open_bench
from tests.integration.harness import proxy
from tests.lmstudio_double import Gate, Reply

_WINDOW = 8192
# Over 60 % of it, and under the trigger.
_BEFORE, _FILLED = 4200, 5200


def test_it_ends_for_whoever_comes_to_another_proxy_and_with_its_own(tmp_path: Any) -> None:
    """In a context that their answers share two proxies see each other: the call of the one is ended for the other.

    A proxy that ends closes its call, and leaves no task that anybody could complain about.
    """
    shared, ending, groups = Gate(), Gate(), [Group("shared", _WINDOW), Group("ending", _WINDOW)]
    with open_bench(tmp_path, groups, {"background": "idle"}, process=True) as bench:
        with proxy(tmp_path / "config.yaml") as second:
            watch = bench.watch("shared", answers(Reply(SUMMARY, gate=shared)))
            for tokens in (_BEFORE, _FILLED):
                bench.proxy.chat("shared", talk("shared", tokens))
            assert shared.reached.wait(60)
            answer = second.chat("shared", [{"role": "user", "content": "Hello."}])
            assert answer.json()["choices"][0]["message"]["content"] == "Understood."
            bench.simulators["shared"].wait_until(lambda: watch.summaries[0].disconnected_s is not None)
            shared.open()
            left = bench.watch("ending", answers(Reply(SUMMARY, gate=ending)))
            for tokens in (_BEFORE, _FILLED):
                second.chat("ending", talk("ending", tokens))
            assert ending.reached.wait(60)
            assert second.process is not None
            second.process.terminate()
            second.process.wait(60)
            bench.simulators["ending"].wait_until(lambda: left.summaries[0].disconnected_s is not None)
            ending.open()
        told = "\n".join(second.lines)
    for complaint in ("Task was destroyed", "never retrieved", "never awaited", "Traceback"):
        assert complaint not in told
