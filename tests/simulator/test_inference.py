"""What requests to one instance share: slots, the KV cache, and the pool of its window."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from litellm_compaction.simulator import Gate, Model, Reply, numbered_words, rendering
from tests.simulator.bench import Bench, BenchFactory, assistant, long_chat, system, tool_round, user


def test_a_growing_conversation_reuses_everything_before_its_tail(bench: BenchFactory) -> None:
    """The next turn computes only what is new: the answer so far is in the cache too."""
    served = bench(script=lambda call: Reply("A fine answer."))
    messages = [system("S" * 400), user("First question")]
    served.chat(*messages)
    first = served.last
    assert (first.cached_tokens, first.computed_tokens) == (0, first.prompt_tokens)
    served.chat(*messages, assistant("A fine answer."), user("Second question"))
    second = served.last
    assert second.cached_tokens == first.prompt_tokens + first.completion_tokens
    assert second.cached_tokens + second.computed_tokens == second.prompt_tokens


def test_a_tool_round_reuses_the_call(bench: BenchFactory) -> None:
    """A generated tool call that comes back in the history is cached, whatever its JSON spacing."""
    served = bench(script=lambda call: Reply(tool_calls=[("read", '{"path":"a.py"}')]))
    served.chat(user("Please read a.py"))
    before = served.last.prompt_tokens
    served.chat(user("Please read a.py"), *tool_round())
    assert served.last.cached_tokens > before + 10


def test_a_change_at_the_front_reuses_nothing_after_it(bench: BenchFactory) -> None:
    """An edited system prompt invalidates all that follows it."""
    served = bench(16384)
    messages = long_chat()
    served.chat(*messages)
    served.chat(system("It is 10:01. You are terse."), *messages[1:])
    assert served.last.cached_tokens < 10


def test_a_cache_that_cannot_go_back(bench: BenchFactory) -> None:
    """It holds all of a prompt that goes on, and nothing of one that was changed; the usage says so where it is to."""
    lead = system("S" * 4000)
    for goes_back in (True, False):
        served = bench(
            script=lambda call: Reply("Fine."),
            models=[Model("m", parallel=1, goes_back=goes_back)],
            reports_cached=True,
        )
        served.chat(lead, user("First"))
        served.chat(lead, user("First"), assistant("Fine."), user("Second"))
        assert served.last.cached_tokens > 100
        changed = served.chat(lead, user("Another")).json()
        assert (served.last.cached_tokens > 100) is goes_back
        assert changed["usage"]["prompt_tokens_details"] == {"cached_tokens": served.last.cached_tokens}


def test_slots_keep_conversations_apart(bench: BenchFactory) -> None:
    """With two slots two conversations stay cached; with one the second displaces the first."""
    first, second = [user("alpha " * 50)], [user("beta " * 50)]
    cached = {}
    for parallel in (1, 2):
        served = bench(models=[Model("m", parallel=parallel)])
        for messages in (first, second, first):
            served.chat(*messages)
        cached[parallel] = served.last.cached_tokens
    assert cached[1] < 10
    assert cached[2] == served.last.prompt_tokens


def test_requests_beyond_the_slots_wait_in_order(bench: BenchFactory) -> None:
    """With one slot a second request starts only when the first has ended."""
    served = bench(models=[Model("m", parallel=1)])
    gate = Gate()
    served.simulator.script = lambda call: Reply("x", gate=gate) if call.index == 0 else None
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(served.chat, user("one"))
        assert gate.reached.wait(60)
        second = pool.submit(served.chat, user("two"))
        served.simulator.wait_until(lambda: len(served.simulator.requests) == 2)
        gate.open()
        assert first.result().status_code == second.result().status_code == 200
    one, two = served.simulator.requests
    assert one.ended_s is not None
    assert two.first_delta_s is not None
    assert two.first_delta_s > one.ended_s


def _two_at_once(served: Bench, words: int, **fields: Any) -> list[Any]:
    """Two answers of two tokens a word, three quarters of both made before either goes on; the results in order."""
    barrier = threading.Barrier(2, timeout=60)
    gates = [Gate(), Gate()]
    served.simulator.script = lambda call: Reply(
        numbered_words(words), gate=gates[call.index], gate_after_tokens=words * 3 // 2
    )

    def ask(number: int) -> Any:
        barrier.wait()
        return served.chat(user(f"number {number}"), **fields)

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask, number) for number in range(2)]
        for gate in gates:
            assert gate.reached.wait(60)
        for gate in gates:
            gate.open()
        return [answer.result() for answer in answers]


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_pool_fails_all_requests(bench: BenchFactory, stream: bool) -> None:
    """When the sum of parallel requests exceeds the window, every one of them fails."""
    served = bench(1000, models=[Model("m", parallel=2)])
    answers = _two_at_once(served, 300, stream=stream)
    assert [answer.status_code for answer in answers] == [200 if stream else 400] * 2
    assert all("Context size has been exceeded." in answer.text for answer in answers)
    assert [record.outcome for record in served.simulator.requests] == ["pool_overflow"] * 2
    served.simulator.script = None
    assert served.chat(user("again")).status_code == 200


def test_without_a_unified_cache_each_request_has_the_window(bench: BenchFactory) -> None:
    """With separate caches the same two requests both succeed."""
    served = bench(1000, models=[Model("m", parallel=2)], unified_kv=False)
    assert [answer.status_code for answer in _two_at_once(served, 300)] == [200, 200]


def test_a_prompt_that_does_not_fit_beside_another_fails_both(bench: BenchFactory) -> None:
    """A new prompt that makes the pool overflow ends the running generation too."""
    served = bench(1000, models=[Model("m", parallel=2)])
    gate = Gate()
    served.simulator.script = lambda call: Reply("x", gate=gate)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(served.chat, user(numbered_words(280)))
        assert gate.reached.wait(60)
        late = served.chat(user(numbered_words(280)))
        assert (running.result().status_code, late.status_code) == (400, 400)
    assert {record.outcome for record in served.simulator.requests} == {"pool_overflow"}


def test_replaying_a_long_conversation_tokenizes_only_what_is_new(
    bench: BenchFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a known conversation of 142 messages no text goes through the tokenizer again, of a longer one its tail."""
    served = bench(131_072)
    messages = long_chat(turns=69, words=200)
    assert len(messages) == 142
    served.chat(*messages, max_tokens=1)
    tokenized: list[str] = []
    known = rendering.load_vocabulary()

    class Telling:
        def encode_ordinary(self, text: str) -> list[int]:
            tokenized.append(text)
            return known.encode_ordinary(text)

    monkeypatch.setattr(rendering, "load_vocabulary", Telling)
    served.chat(*messages, max_tokens=1)
    assert tokenized == []
    served.chat(*messages, assistant("It was the parser."), user("And what is new?"), max_tokens=1)
    assert sorted(tokenized, key=len)[-2:] == ["And what is new?", "It was the parser."]
    assert sum(map(len, tokenized)) < 100
