"""The promises P1 to P5 and P8 of the design, over HTTP, as a client and LM Studio see them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.builders import ONE_ROUND, answered, prose, talk
from tests.integration.bench import SUMMARY, Bench, answers, is_summary_call
from tests.integration.harness import until
from tests.lmstudio_double import ChatCall, Gate, Reply

WINDOW = 8192


def test_doubt_asks_before_it_compacts(guarded: Bench) -> None:
    """What is too long by our estimate alone goes as it came: a question or two, no more later.

    Where it may be longer than the window, a part of it that certainly fits is asked about first.
    """
    watch = guarded.watch("doubted")
    messages = talk("doubted", 3000)
    for turn in range(3):
        answer = guarded.proxy.chat("doubted", messages)
        assert (answer.status_code, answer.headers["x-litellm-compaction"]) == (200, "none")
        assert watch.sent() == messages
        messages = answered(messages, "Understood.", f"And {turn}?")
    *parts, question = watch.questions
    assert len(parts) <= 1
    # A part of it may say enough.
    part = (question.body or {})["messages"]
    assert part == watch.sent(0)[: len(part)]
    assert watch.summaries == []


def test_identical_concurrent_requests_share_one_summary(guarded: Bench) -> None:
    """Four identical requests at the same time cost one summary call and send the same bytes."""
    gate = Gate()
    watch = guarded.watch("twin", answers(Reply(SUMMARY, gate=gate)))
    messages = talk("twins", ONE_ROUND)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(guarded.proxy.chat, "twin", messages) for _ in range(4)]
        assert gate.reached.wait(60)
        guarded.window_of("local")  # answered by the same event loop, after those that came before
        gate.open()
        assert [answer.result().status_code for answer in running] == [200] * 4
    assert len(watch.summaries) == 1
    assert all(watch.sent(index) == watch.sent(0) for index in range(4))


def test_shrunk_window_is_noticed_and_integrated(guarded: Bench) -> None:
    """When the model is loaded anew with half the context, requests fit it, and the record so far is built on."""

    def remembering(call: ChatCall) -> Reply:
        known = "ALPHA-7" in call.prompt_text or len(watch.summaries) == 1
        return Reply(f"### Current state\n{'ALPHA-7 holds.' if known else 'Nothing is known.'}")

    watch = guarded.watch("shrinking", lambda call: remembering(call) if is_summary_call(call.body) else None)
    messages = talk("shrinking", 12_500)
    first = guarded.proxy.chat("shrinking", messages)
    assert first.headers["x-litellm-compaction-window"] == "16384"
    assert len(watch.summaries) == 1
    guarded.load("shrinking", 4096)
    # It is noticed as ever: by the requests that come meanwhile.
    until(lambda: guarded.window_of("shrinking") == 4096)
    for turn in range(12):
        messages = answered(messages, prose(f"shrink {turn}", 200), f"Next {turn}.")
        answer = guarded.proxy.chat("shrinking", messages)
        assert (answer.status_code, answer.headers["x-litellm-compaction-window"]) == (200, "4096")
        assert watch.problems(messages) == []
        assert "ALPHA-7" in str(watch.sent())
    assert 2 <= len(watch.summaries) < 8


def test_defect_of_ours_fails_open_and_shows(permissive: Bench) -> None:
    """When our own counting breaks, the request goes on unchanged, and the log says where, without its words."""
    watch = permissive.watch("sabotaged-count")
    canary = "BLUE-CANARY-1138"
    messages = [*talk("broken inside", 800), {"role": "assistant", "content": "."}, {"role": "user", "content": canary}]
    for stream in (False, True):
        answer = permissive.proxy.post({"model": "sabotaged-count", "messages": messages, "stream": stream})
        assert answer.status_code == 200
        assert watch.sent() == messages
        assert "max_tokens" not in watch.bodies[-1]
    assert (
        len(permissive.proxy.expect_logged(r"ERROR: failed_open hook=pre_call error=ValueError at=sabotage\.py", 2))
        == 2
    )
    assert len(permissive.proxy.expect_logged(r"ERROR: failed_open hook=deployment error=ValueError", 2)) == 2
    assert [line for line in permissive.proxy.lines if canary in line] == []


def test_defect_after_the_answer_does_not_take_the_answer_away(permissive: Bench) -> None:
    """When learning from an answer breaks, the client has its answer all the same."""
    permissive.watch("sabotaged-learn")
    messages = talk("broken after", 800)
    answer = permissive.proxy.chat("sabotaged-learn", messages)
    assert answer.json()["choices"][0]["message"]["content"] == "Understood."
    streamed = permissive.proxy.stream("sabotaged-learn", messages)
    assert (streamed.text, streamed.lines[-1]) == ("Understood.", "data: [DONE]")
    assert [chunk for chunk in streamed.chunks if "error" in chunk] == []
    permissive.proxy.expect_logged("ERROR: failed_open hook=learn error=")
