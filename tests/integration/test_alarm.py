"""What happens when the server cuts or refuses in spite of us: the alarm, and what is learned for the next request.

Each group is loaded anew once, with a smaller window, while the proxy trusts the old one for an hour.
"""

from __future__ import annotations

import pytest

from tests.builders import talk
from tests.integration.app import NETWORK
from tests.integration.bench import Bench, is_question
from tests.integration.forms import ask


@pytest.mark.parametrize("how", ["plain", "stream"])
def test_silent_truncation_raises_the_alarm_and_is_not_repeated(patient: Bench, how: str) -> None:
    """A reply whose usage shows that the prompt was cut is a warning, and makes the window be read anew."""
    group = f"cut-{how}"
    # The server is asked about a long prompt before it is sent, as long as none of its numbers is known.
    assert patient.proxy.chat(group, talk(f"{group} before", 6000), max_tokens=64).status_code == 200
    _shrink(patient, group)
    watch = patient.watch(group)
    messages = talk(group, 7000)
    body = {"model": group, "messages": messages, "stream": how == "stream", "max_tokens": 64}
    assert patient.proxy.post(body).status_code == 200
    assert watch.chats[-1].truncated
    patient.forgive(group)
    again = patient.proxy.post(body)
    assert again.headers["x-litellm-compaction-window"] == "4096"
    assert watch.problems(messages) == []
    (alarm,) = patient.proxy.expect_logged(f"truncation_alarm model={group}")
    assert "WARNING" in alarm
    assert "reason=prompt_far_below_count" in alarm
    assert "window=16384" in alarm


def test_a_question_that_is_cut_shows_the_smaller_window(patient: Bench) -> None:
    """A first prompt of more than half of the window is asked about; the answer's low number is no count of it."""
    _shrink(patient, "asked")
    watch = patient.watch("asked")
    answer = patient.proxy.chat("asked", talk("asked", 9000), max_tokens=64)
    assert answer.headers["x-litellm-compaction-window"] == "4096"
    # What is made for the smaller window may be asked about, too, and fits it.
    first, *later = [record.truncated for record in watch.simulator.requests if is_question(record.body)]
    assert first
    assert not any(later)
    assert not any(record.truncated for record in watch.chats)
    assert patient.proxy.logged("truncation_alarm model=asked") == []
    patient.forgive("asked")


@pytest.mark.parametrize(
    ("route", "stream"), [("chat", True), ("messages", False), ("responses", True), ("completions", False)]
)
def test_a_server_that_has_ended_is_named_as_such(
    patient: Bench, monkeypatch: pytest.MonkeyPatch, route: str, stream: bool
) -> None:
    """Since its window was read: the client learns what to do, the log where, and LiteLLM's own lines are left out."""
    hello = [{"role": "user", "content": "Hello."}]
    assert ask(patient, route, "local", hello, stream=stream).status == 200
    served, since = patient.simulators["local"], len(patient.proxy.lines)
    with monkeypatch.context() as ended:
        for netloc in [netloc for netloc, each in NETWORK.servers.items() if getattr(each, "simulator", 0) is served]:
            ended.setitem(NETWORK.servers, netloc, None)
        said = ask(patient, route, "local", hello, stream=stream)
    # What this asks for is served, and its line comes after all of theirs.
    assert patient.window_of("local") == 8192
    todo = "does not answer. Start its server (lms server start) or correct api_base."
    assert (said.status, said.events[0]["error"]["message"]) == (503, f"LM Studio {todo}")
    (line,) = [each for each in patient.proxy.lines[since:] if each.strip() and "INFO" not in each]
    assert "litellm_compaction:WARNING: refused model=local: LM Studio at http://127.0.0.1:" in line
    assert line.endswith(f"/v1 {todo}")


def _shrink(patient: Bench, group: str) -> None:
    """Loads the model with a smaller window behind the proxy's back."""
    assert patient.window_of(group) == 16384
    patient.load(group, 4096)
