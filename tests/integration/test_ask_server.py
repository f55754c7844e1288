"""LM Studio's own protocol through a real proxy: exact counts for any tokenizer, reloads, and every way not to pass.

After every test promise P1 is checked for all groups: nothing was cut, and no answer could outgrow its window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.builders import talk
from tests.integration.bench import Bench, Group, Watch, open_bench
from tests.lmstudio_double import SDK_MODES, SdkMode

WINDOW = 8192
FACTORS = (0.8, 1.0, 1.2)
STRANGE = "acme/strange-7b"
HARSH = [mode for mode in SDK_MODES if mode != "fine"]
_EXACT = [
    *(Group(f"factor-{factor}", factor=factor, key=STRANGE, architecture="strange") for factor in FACTORS),
    Group("reloaded", 32_768),
]
_GROUPS = [
    *(Group(f"harsh-{mode}", factor=1.2, key=STRANGE, architecture="strange") for mode in HARSH),
    Group("tokens"),
]
_SETTINGS = {"window_cache_s": 3600, "background": "off"}


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The defaults, but that no reload is noticed by reading the list again."""
    with open_bench(tmp_path_factory.mktemp("asking"), _GROUPS, _SETTINGS) as bench:
        yield bench


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A time limit for machines that are busy with other tests, too: in `asking` it would be waited for."""
    settings = {**_SETTINGS, "ask_server_timeout_s": 30}
    with open_bench(tmp_path_factory.mktemp("exact"), _EXACT, settings) as bench:
        yield bench


def sent(bench: Bench, name: str, messages: list[dict[str, Any]], **body: Any) -> Watch:
    """What came of a request that was answered."""
    watch = bench.watch(name)
    answer = bench.proxy.chat(name, messages, max_tokens=64, **body)
    assert answer.status_code == 200, answer.text
    return watch


@pytest.mark.parametrize("factor", FACTORS)
def test_any_tokenizer_is_counted_exactly(exact: Bench, factor: float) -> None:
    """Nothing is compacted below the real trigger or refused that fits, and no question costs a prefill."""
    name = f"factor-{factor}"
    for share in (0.3, 0.5, 0.6, 0.68, 0.9, 1.5):
        messages = talk(f"{name} {share}", int(share * WINDOW / factor))
        watch = sent(exact, name, messages)
        assert (len(watch.sent()) == len(messages)) == (share < 0.7)
        assert watch.questions == []
    question = [{"role": "user", "content": "word " * int(0.9 * WINDOW / factor)}]
    assert sent(exact, name, question).questions == []
    refused = exact.proxy.chat(name, [{"role": "user", "content": "word " * int(1.2 * WINDOW / factor)}])
    assert refused.status_code == 400
    assert "maximum context length" in refused.text
    assert exact.simulators[name].sdk.faults() == []
    assert len(exact.simulators[name].sdk.open_sockets()) == 1


def test_a_reload_is_noticed_by_the_next_request(exact: Bench) -> None:
    """A model loaded anew with an eighth of its window, then with all of it, or another one of its name (P1)."""
    messages, simulator = talk("reloaded", 12_000), exact.simulators["reloaded"]
    sent(exact, "reloaded", messages)
    for window, factor in ((4096, 1), (32_768, 1), (8192, 1), (4096, 1), (32_768, 2.7), (16_384, 1.45), (32_768, 1)):
        simulator.models = [replace(model, tokens_factor=factor) for model in simulator.models]
        exact.load("reloaded", window)
        for each in (talk(f"at {window} {factor}", 12_000), messages):
            watch = sent(exact, "reloaded", each)
            whole = len(watch.sent()) == len(each)
            assert (watch.chats[-1].context_length, whole) == (window, window == 32_768 and factor == 1)


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[pytest.mark.full] if mode == "huge" else []) for mode in HARSH]
)
def test_whatever_does_not_pass_is_done_without(asking: Bench, mode: SdkMode) -> None:
    """Everything is answered; what is wrong is said once, with what to do."""
    name = f"harsh-{mode}"
    asking.simulators[name].sdk.mode = mode
    for share in (0.5, 0.9):
        messages = talk(f"{name} {share}", int(share * WINDOW / 1.2))
        watch = sent(asking, name, messages)
        assert share > 0.7 or len(watch.sent()) == len(messages)
    assert asking.simulators[name].sdk.sockets
    if mode not in ("busy", "unknown"):
        asking.proxy.expect_logged(r"ask_server server=\S+: LM Studio's own protocol does not answer")
