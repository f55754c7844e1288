"""Answers that are not streamed and do not fit the window."""

from __future__ import annotations

from litellm_compaction.simulator import Reply
from tests.integration.restart_bench import TEXTS, Restarting, Teller, asked, both_carriers


@both_carriers
def test_whole_answer_is_inside_of_the_window(restarting: Restarting) -> None:
    """By each carrier no request of it can outgrow the window; what the client reads is the model's own beginning."""
    watch = restarting.watch("local", Teller(Reply(TEXTS["json"])))
    messages = asked("whole json")
    (choice,) = restarting.proxy.chat("local", messages, response_format={"type": "json_object"}).json()["choices"]
    assert TEXTS["json"].startswith(choice["message"]["content"])
    assert choice["finish_reason"] == ("stop" if choice["message"]["content"] == TEXTS["json"] else "length")
    assert [watch.problems(messages, index) for index in range(len(watch.chats))] == [[]] * len(watch.chats)
