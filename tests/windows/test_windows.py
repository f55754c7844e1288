"""The window of a target: sources, age, who reads it, single flight, learned limits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest

from litellm_compaction.errors import ModelNotLoaded, WindowUnknown, WindowUnread
from litellm_compaction.windows.fetch import Unreached
from litellm_compaction.windows.windows import Window, Windows, may_cut
from tests.virtual_time import Clock, in_virtual_time
from tests.windows.conftest import CACHE_S
from tests.windows.fake_lmstudio import BASE, FakeLMStudio, target, v0_model, v1_model


async def test_models_and_copies_are_listed_with_what_is_loaded(
    server: FakeLMStudio, windows: Windows, clock: Clock
) -> None:
    """Every chat model, loaded or not, and each copy by its own name; of a server that is gone nothing."""
    embedding = v1_model("text-embedding-x", _=2048) | {"type": "embedding"}
    server.list_v1(v1_model("qwen/qwen3-8b", _=12288), v1_model("idle"), v1_model("twice", mine=4096), embedding)
    assert await windows.listed(target("*")) == {"qwen/qwen3-8b": True, "idle": False, "twice": True, "mine": True}
    for other in (target("*", is_lmstudio=False), target("*", api_base=None)):
        assert await windows.listed(other) == {}
    clock.now_s += 60
    server.down = httpx.ConnectError("refused")
    assert await windows.listed(target("*")) == {}


async def test_a_listing_without_a_length_needs_the_operator(server: FakeLMStudio, windows: Windows) -> None:
    """v0 does not always name loaded_context_length. Not loaded is another thing: a load may choose any length."""
    server.list_v0(v0_model("qwen3-8b", tokens=None))
    with pytest.raises(WindowUnknown, match="without a context length"):
        await windows.resolve(target())
    assert (await windows.resolve(target(context_length=7000))).source == "operator"
    server.list_v1(v1_model())
    with pytest.raises(ModelNotLoaded):
        await windows.resolve(target(context_length=32768), fresh=True)


async def test_an_unlisted_model_falls_back(server: FakeLMStudio, windows: Windows, clock: Clock) -> None:
    """Operator first, then a learned limit, however old beside a guess, else an error that says what was tried."""
    server.list_v1(v1_model(_=8192))
    with pytest.raises(WindowUnknown, match="/api/v1/models lists 1 models, none of them other"):
        await windows.resolve(target("other"))
    windows.learn(target("other"), 6000)
    assert (await windows.resolve(target("other"))).source == "learned"
    window = await windows.resolve(target("other", context_length=5000))
    assert (window.tokens, window.source) == (5000, "operator")
    clock.now_s += 3600
    number = target("other", context_length=9000)
    assert (await windows.resolve(number)).tokens == 9000
    assert (await windows.resolve(replace(number, context_source="default"))).tokens == 6000


@pytest.mark.parametrize("failure", [httpx.ReadTimeout("slow"), {"/api/v1/models": httpx.Response(503)}])
async def test_one_late_answer_refuses_one_request(
    server: FakeLMStudio, windows: Windows, clock: Clock, failure: Exception | dict[str, object]
) -> None:
    """A server that takes connections is alive: whoever comes next asks again, at the same moment already."""
    answers = server.answers
    server.list_v1(v1_model(_=8192))
    await windows.resolve(target())
    clock.now_s += CACHE_S
    fail(server, failure)
    with pytest.raises(WindowUnread):
        await windows.resolve(target())
    server.down, server.answers = None, answers
    assert (await windows.resolve(target())).tokens == 8192


@pytest.mark.parametrize(("answers_s", "knows"), [(25.0, [True, True, True]), (50.0, [False, False, True])])
@in_virtual_time
async def test_a_slow_listing_is_waited_for_by_all(answers_s: float, knows: list[bool]) -> None:
    """Half a minute, by one read, however often one asks; a later answer refuses those that waited."""
    loop, requests = asyncio.get_running_loop(), list[httpx.Request]()

    async def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        await asyncio.sleep(answers_s - loop.time())
        return httpx.Response(200, json={"models": [v1_model(_=8192)]})

    async def ask(after_s: float) -> bool:
        await asyncio.sleep(after_s)
        try:
            return await windows.resolve(target()) == await windows.resolve(target())
        except WindowUnknown:
            return False

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        windows = Windows(cache_s=CACHE_S, http=http, clock=loop.time)
        assert await asyncio.gather(ask(0), ask(20), ask(30.001)) == knows
        assert len(requests) == 2
        await windows.aclose()


async def test_other_servers_are_never_asked(server: FakeLMStudio, windows: Windows) -> None:
    """No request is sent for a target that is not LM Studio."""
    window = await windows.resolve(target(context_length=128000, is_lmstudio=False))
    assert (window.tokens, window.source) == (128000, "operator")
    with pytest.raises(WindowUnknown):
        await windows.resolve(target(is_lmstudio=False), fresh=True)
    windows.invalidate(target(is_lmstudio=False))
    windows.learn(target(is_lmstudio=False), 9000)
    assert (await windows.resolve(target(is_lmstudio=False))).tokens == 9000
    assert server.requests == []


FAILURES: list[Exception | dict[str, object]] = [
    httpx.ConnectError("refused"),
    httpx.ReadTimeout("slow"),
    {"/api/v1/models": httpx.Response(503)},
    {"/api/v1/models": httpx.Response(401), "/api/v0/models": httpx.Response(401)},
    {"/api/v1/models": {"error": "Unexpected endpoint."}},
]


def fail(server: FakeLMStudio, failure: Exception | dict[str, object]) -> None:
    if isinstance(failure, Exception):
        server.down = failure
    else:
        server.answers = failure


@pytest.mark.parametrize("is_young", [False, True])
@pytest.mark.parametrize("failure", FAILURES)
async def test_one_number_that_cannot_be_read_again_is_refused(
    server: FakeLMStudio, windows: Windows, clock: Clock, failure: Exception | dict[str, object], is_young: bool
) -> None:
    """It is old, or an error made it doubtful, and may be that of a larger window than the model has now."""
    answers = server.answers
    server.list_v1(v1_model(_=32768))
    await windows.resolve(target())
    clock.now_s += 1 if is_young else 7
    windows.invalidate(target())
    fail(server, failure)
    for _ in range(3):
        for number in (target(), replace(target(context_length=4096), context_source="default")):
            with pytest.raises(match=f"32768 tokens, is {1 if is_young else 7} s old"):
                await windows.resolve(number)
    clock.now_s += 1
    server.down, server.answers = None, answers
    server.list_v1(v1_model(_=4096))
    assert (await windows.resolve(target())).tokens == 4096


@pytest.mark.parametrize(("written", "expected"), [(6000, 6000), (50_000, 8192)])
@pytest.mark.parametrize("failure", FAILURES)
async def test_the_operator_is_told_once_that_their_number_counts(
    server: FakeLMStudio,
    windows: Windows,
    clock: Clock,
    failure: Exception | dict[str, object],
    written: int,
    expected: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As long as the server does not answer, and again at the next time; a larger one lifts nothing."""
    answers = server.answers
    for times in (1, 2):
        server.down, server.answers = None, answers
        server.list_v1(v1_model(_=8192))
        assert (await windows.resolve(target(context_length=written), fresh=True)).tokens == 8192
        fail(server, failure)
        for _ in range(5):
            clock.now_s += CACHE_S + 1
            assert (await windows.resolve(target(context_length=written))).tokens == expected
        assert len([record for record in caplog.records if "window_not_read" in record.message]) == times


async def test_a_learned_limit_lowers_the_window_for_a_while(
    server: FakeLMStudio, windows: Windows, clock: Clock
) -> None:
    """An overflow error counts for 600 s, and for its asker alone (P9): its text may be of a client's making."""
    server.list_v1(v1_model(_=8192))
    await windows.resolve(target())
    for nonsense in (0, 8193):
        windows.learn(target(), nonsense)
        assert (await windows.resolve(target())).tokens == 8192
    windows.learn(target(), 6000)
    window = await windows.resolve(target())
    assert (window.tokens, window.source, window.parallel) == (6000, "learned", 4)
    assert (await windows.resolve(replace(target(), asker="carol"))).tokens == 8192
    clock.now_s += 600
    assert (await windows.resolve(target(), fresh=True)).tokens == 8192


async def test_a_learned_limit_ends_with_the_load_that_taught_it(server: FakeLMStudio, windows: Windows) -> None:
    """Whoever loads the model with more, as a refusal advises, has it at once; a listing may have been old by then."""
    for listed, learned, loaded in ((8192, 8192, 32768), (8192, 6000, 32768), (16384, 1024, 1024)):
        server.list_v1(v1_model(_=listed))
        await windows.resolve(target(), fresh=True)
        windows.learn(target(), learned)
        assert (await windows.resolve(target())).tokens == learned
        for tokens in (loaded, 16384):
            server.list_v1(v1_model(_=tokens))
            assert (await windows.resolve(target(), fresh=True)).tokens == tokens


async def test_a_limit_learned_before_the_listing_holds(server: FakeLMStudio, windows: Windows, clock: Clock) -> None:
    """The only number known never expires; beside a listing, or an operator's number, it holds for 600 s."""
    server.down = httpx.ConnectError("refused")
    windows.learn(target(), 6000)
    clock.now_s += 6000
    assert (await windows.resolve(target())).tokens == 6000
    windows.learn(target(), 6000)
    assert (await windows.resolve(target(context_length=9000))).source == "learned"
    server.down = None
    server.list_v1(v1_model(_=8192))
    windows.learn(target(), 6000)
    assert (await windows.resolve(target(), fresh=True)).tokens == 6000
    clock.now_s += 600
    assert (await windows.resolve(target(), fresh=True)).tokens == 8192


@pytest.mark.parametrize(("failure", "holds_s"), [(None, 60), (httpx.ConnectError("refused"), 5)])
async def test_what_is_not_lm_studio_now_may_be_later(
    server: FakeLMStudio, windows: Windows, clock: Clock, failure: Exception | None, holds_s: float
) -> None:
    """One that is started later has to be found; a no is believed for longer than silence."""
    server.down = failure
    for pause_s, asked in ((0, 1), (holds_s - 1, 1), (1, 2)):
        clock.now_s += pause_s
        assert await windows.is_lmstudio(BASE, None) is (None if failure else False)
        assert server.paths.count("/lmstudio-greeting") == asked


def test_a_prompt_that_no_window_cuts_needs_no_second_look() -> None:
    """Of 2,000 tokens, or a quarter of a small window."""
    for window_tokens, most_tokens in ((32_768, 2_000), (4096, 1024)):
        window = Window(tokens=window_tokens, source="api/v1", instance_id="m")
        assert [may_cut(window, most_tokens + more) for more in (0, 1)] == [False, True]


@pytest.mark.parametrize(
    ("answers", "waited_s", "found"),
    [
        # How long each answer takes, with what it is; what four requests, 10 s apart, wait and learn.
        ([(0, None), (0, None), (0, True)], [0, 0, 0, 0], [None, None, True, True]),
        # A silent server is waited for half a minute once, then for 3 s of each time that it is asked.
        ([(60, True)], [30, 0, 0, 0], [None, None, None, True]),
        ([(29, None), (29, True)], [29, 3, 0, 0], [None, None, None, None]),
        ([(25, True)], [25, 0, 0, 0], [True, True, True, True]),
        # What has said no is waited for no longer than that either.
        ([(0, False), (0, False), (40, True)], [0, 0, 0, 0], [False, False, False, False]),
    ],
)
@in_virtual_time
async def test_a_silent_server_holds_nobody_up_for_long(
    answers: list[tuple[float, bool | None]],
    waited_s: list[float],
    found: list[bool | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LM Studio that loads a model takes its time; one that never answers keeps nobody waiting again and again."""
    left, loop = iter(answers), asyncio.get_running_loop()

    async def asked(*_: object) -> bool:
        after_s, answer = next(left)
        await asyncio.sleep(after_s)
        if answer is None:
            raise Unreached("no connection")
        return answer

    monkeypatch.setattr("litellm_compaction.windows.windows.answers_as_lmstudio", asked)
    windows = Windows(cache_s=5.0, clock=loop.time)
    for expected_s, is_lmstudio in zip(waited_s, found, strict=True):
        begun_s = loop.time()
        assert await windows.is_lmstudio(BASE, None) is is_lmstudio
        assert round(loop.time() - begun_s, 1) == expected_s
        await asyncio.sleep(10)
    await windows.aclose()
