"""What happens when the server cuts or refuses in spite of us: the alarm, and what is learned for the next request."""

from __future__ import annotations

import pytest

from litellm_compaction.simulator import Reply
from tests.integration.bench import KEY, Bench, answers
from tests.integration.conversations import talk

pytestmark = pytest.mark.proxy


def _shrink(patient: Bench, group: str, window: int) -> None:
    """Loads the model with a smaller window behind the proxy's back, which trusts the old one for an hour."""
    patient.window_of(group)
    simulator = patient.simulators[group]
    for instance in list(simulator.instances):
        simulator.unload(instance.id)
    simulator.load(KEY, window)


@pytest.mark.parametrize("stream", [False, True])
def test_silent_truncation_raises_the_alarm_and_is_not_repeated(patient: Bench, stream: bool) -> None:
    """A reply whose usage shows that the prompt was cut is a warning, and makes the window be read anew."""
    watch = patient.watch("cut")
    _shrink(patient, "cut", 4096)
    before = len(patient.proxy.logged("truncation_alarm"))
    messages = talk(f"cut {stream}", 9000)
    body = {"model": "cut", "messages": messages, "stream": stream, "max_tokens": 64}
    assert patient.proxy.post(body).status_code == 200
    assert watch.chats[-1].truncated
    patient.forgive("cut")
    again = patient.proxy.post(body)
    assert again.headers["x-litellm-compaction-window"] == "4096"
    assert watch.problems(messages) == []
    alarms = patient.proxy.logged("truncation_alarm")[before:]
    assert len(alarms) == 1
    assert "model=cut" in alarms[0]
    assert "reason=prompt_far_below_count" in alarms[0]
    _shrink(patient, "cut", 16384)
    patient.forgive("cut")
    patient.simulators["cut"].truncated_usage = "sent"
    _relearn(patient, "cut", 16384)
    patient.simulators["cut"].truncated_usage = "kept"


def test_usage_above_the_window_raises_the_alarm(patient: Bench) -> None:
    """A reported prompt larger than the window that we know is a warning too."""
    watch = patient.watch("local")
    simulator = watch.simulator
    simulator.models = [type(simulator.models[0])(KEY, tokens_factor=2.2)]
    for instance in list(simulator.instances):
        simulator.unload(instance.id)
    simulator.load(KEY, 16384)
    before = len(patient.proxy.logged("truncation_alarm"))
    assert patient.proxy.chat("local", talk("above", 4400), max_tokens=16).status_code == 200
    assert watch.chats[-1].prompt_tokens > 8192
    assert any("reason=prompt_above_window" in line for line in patient.proxy.logged("truncation_alarm")[before:])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("group", ["refusing-string", "refusing-object", "event"])
def test_overflow_error_teaches_the_limit(patient: Bench, group: str, stream: bool) -> None:
    """An overflow error, whatever its shape, reaches the client once; the next request fits the limit that it named."""
    watch = patient.watch(group)
    _shrink(patient, group, 4096)
    messages = talk(f"{group} {stream}", 9000)
    body = {"model": group, "messages": messages, "stream": stream, "max_tokens": 64}
    failed = patient.proxy.post(body)
    assert watch.chats[-1].outcome == "overflow"
    assert failed.status_code >= 400 or '"error"' in failed.text
    patient.forgive(group)
    again = patient.proxy.post(body)
    assert again.status_code == 200
    assert again.headers["x-litellm-compaction-window"] == "4096"
    assert watch.problems(messages) == []
    _shrink(patient, group, 16384)
    patient.forgive(group)
    _relearn(patient, group, 16384)


def test_empty_answer_at_a_full_window_raises_the_alarm(patient: Bench) -> None:
    """An empty answer to a prompt that fills the window is a warning: some engines overflow like that."""
    watch = patient.watch("cut", answers(reply=Reply("")))
    watch.simulator.overflow = "empty"
    _shrink(patient, "cut", 4096)
    before = len(patient.proxy.logged("truncation_alarm"))
    answer = patient.proxy.chat("cut", talk("empty", 9000), max_tokens=64)
    patient.forgive("cut")
    watch.simulator.overflow = "truncate_middle"
    assert answer.status_code == 200
    assert watch.chats[-1].outcome == "overflow"
    again = patient.proxy.chat("cut", talk("empty", 9000), max_tokens=64)
    assert patient.proxy.logged("truncation_alarm")[before:] or again.headers["x-litellm-compaction-window"] == "4096"


def _relearn(patient: Bench, group: str, window: int) -> None:
    """Brings the proxy back to a larger window, which it would otherwise not look for within the hour."""
    patient.groups[group].make()
    del window
