"""What a compaction costs the one who waits, with and without records that are written while nobody does.

    python benchmarks/cost/background.py [--rounds 3]

Real proxies in front of the simulator, which reads 4,000 and writes 100 tokens/s in one slot and keeps the last prompt
in its cache. A conversation that fills over 60 % of 8,192 goes on by a turn that has to be compacted: the answer before
it was long (`chat`), what comes with it is as long as what came before (`agent`, as tools' results are), or longer than
anything before it (`leap`). `normal` is the same turn of a shorter conversation, with the same new text, and `before`
the turn between, when the record may have been written already. Medians of the time to the first word of the answer,
and of the prompt tokens that the server had to read for it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from litellm_compaction.engine.background import QUIET_S
from tests.builders import prose, talk
from tests.integration.bench import Bench, Group, is_summary_call, open_bench
from tests.integration.harness import CHAT
from tests.lmstudio_double import ChatCall, Reply

_GROUP = Group("idle", 8192, slots=1, simulator={"prompt_tokens_per_second": 4000.0, "tokens_per_second": 100.0})
_SHORT_TOKENS, _FILLED_TOKENS = 3000, 5200
_LONG_WORDS, _STEP_WORDS = 1100, 400
# The next step but one crosses the trigger.
_AGENT_TOKENS = 5050
_SUMMARY = "### Current state\n" + "\n".join(f"- {prose(f'line {number}', 12)}" for number in range(20))
_WAIT_S, _BEGIN_S = 60.0, 0.8


class Turn(NamedTuple):
    """What a turn took."""

    first_s: float
    read_tokens: int
    prompt_tokens: int


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3, help="conversations of each kind")
    options = parser.parse_args()
    print("background  kind    turn        first word    of normal   tokens read   of its prompt")
    for background in ("off", "idle"):
        with tempfile.TemporaryDirectory() as folder:
            for kind, turns in _measured(Path(folder), background, options.rounds).items():
                normal_s = statistics.median(turn.first_s for turn in turns["normal"])
                for name, several in turns.items():
                    first_s = statistics.median(turn.first_s for turn in several)
                    read = statistics.median(turn.read_tokens for turn in several)
                    share = statistics.median(turn.read_tokens / turn.prompt_tokens for turn in several)
                    line = f"{background:11} {kind:7} {name:11} {1000 * first_s:7.0f} ms {first_s / normal_s:10.2f} x"
                    print(f"{line} {read:12.0f} {100 * share:12.1f} %")


def _measured(folder: Path, background: str, rounds: int) -> dict[str, dict[str, list[Turn]]]:
    found: dict[str, dict[str, list[Turn]]] = {kind: defaultdict(list) for kind in ("chat", "agent", "leap")}
    with open_bench(folder, [_GROUP], {"background": background}) as bench:
        for kind, turns in found.items():
            for number in range(rounds + 1):
                for name, turn in _conversation(bench, kind, number).items():
                    if number:
                        # The first one loads what is loaded lazily.
                        turns[name].append(turn)
    return found


def _conversation(bench: Bench, kind: str, number: int) -> dict[str, Turn]:
    """The turns of two conversations, one of which comes to its trigger."""
    _, normal = _turns(bench, kind, f"{kind} {number} short", _SHORT_TOKENS)
    filled_tokens = _AGENT_TOKENS if kind == "agent" else _FILLED_TOKENS
    before, compacted = _turns(bench, kind, f"{kind} {number}", filled_tokens)
    return {"normal": normal, "before": before, "compacted": compacted}


def _turns(bench: Bench, kind: str, topic: str, tokens: int) -> tuple[Turn, Turn]:
    """Two turns at the end of a conversation."""
    bench.watch(_GROUP.name, _model("Understood."))
    messages = _steps(topic, tokens) if kind == "agent" else talk(topic, tokens)
    _turn(bench, messages)
    _rest(bench)
    long = prose(topic, _STEP_WORDS if kind == "agent" else _LONG_WORDS)
    answer = long if kind == "chat" else "Understood."
    bench.watch(_GROUP.name, _model(answer))
    messages = _next(messages, "Understood.", prose(f"{topic} before", _STEP_WORDS) if kind == "agent" else "And then?")
    before = _turn(bench, messages)
    _rest(bench)
    bench.watch(_GROUP.name, _model("Understood."))
    return before, _turn(bench, _next(messages, answer, "Go on." if kind == "chat" else long))


def _steps(topic: str, tokens: int) -> list[dict[str, Any]]:
    """A conversation of so many tokens that its client's messages have filled, each as long as the others."""
    steps, first_words = divmod(tokens, _STEP_WORDS + 20)
    messages: list[dict[str, Any]] = [{"role": "user", "content": prose(topic, first_words + 20)}]
    for number in range(steps):
        messages = _next(messages, "Understood.", prose(f"{topic} {number}", _STEP_WORDS))
    return messages


def _model(reply: str) -> Any:
    def script(call: ChatCall) -> Reply:
        # As fast as nobody waits for it: a turn is measured to its first word.
        return Reply(_SUMMARY) if is_summary_call(call.body) else Reply(reply, tokens_per_second=4000.0)

    return script


def _next(messages: list[dict[str, Any]], answer: str, text: str) -> list[dict[str, Any]]:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": text}]


def _turn(bench: Bench, messages: list[dict[str, Any]]) -> Turn:
    simulator = bench.simulators[_GROUP.name]
    begun_s, first_s = time.monotonic(), 0.0
    body = {"model": _GROUP.name, "messages": messages, "stream": True}
    with bench.proxy.client.stream(
        "POST", CHAT, json=body, headers={**bench.proxy.headers, "user-agent": "b"}
    ) as answer:
        for line in answer.iter_lines():
            if not first_s and '"content":"' in line.replace('": "', '":"') and '"content":""' not in line:
                first_s = time.monotonic() - begun_s
    record = next(each for each in reversed(simulator.requests) if each.path == CHAT and not is_summary_call(each.body))
    return Turn(first_s, record.computed_tokens, record.kept_tokens)


def _rest(bench: Bench) -> None:
    """Until nothing has come to the server for longer than it takes to begin in the background."""
    simulator = bench.simulators[_GROUP.name]
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + _WAIT_S:
        last_s = max([begun_s, *((each.ended_s or time.monotonic()) for each in simulator.requests)])
        if time.monotonic() - last_s > QUIET_S + _BEGIN_S:
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main()
