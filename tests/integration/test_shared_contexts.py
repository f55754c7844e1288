"""Several requests at once in one loaded context, through a real proxy: all whole, each compaction made once.

In front of LM Studio with its default of four slots, and of llama.cpp's server with as many over one unified cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.builders import prose
from tests.integration.bench import SUMMARY, Bench, Group, is_summary_call, open_bench
from tests.integration.restart_bench import without_restarts
from tests.lmstudio_double import ChatCall, Reply

_WINDOW = 4096
_OPTED_IN = {"enabled": True}
# As fast as a busy proxy cannot read four of them.
_FAST = {"tokens_per_second": 1000.0, "chunk_tokens": 4}
_GROUPS = [
    Group("alike", 8192),
    # Nobody says that it is shared: the first overflow does, and ends four answers.
    Group("old", _WINDOW, provider="openai", compaction=_OPTED_IN, guarded=False,
          simulator={**_FAST, "api": "llama.cpp", "tells_whole": False}),
    *(
        Group(f"slots-{how}", _WINDOW, provider="openai", compaction=_OPTED_IN, simulator={**_FAST, "api": "llama.cpp"})
        for how in ("stream", "whole")
    ),
    # The simulator writes one answer, whatever it is asked for: so does LM Studio, by its documentation.
    *(Group(f"single-{how}", provider="openai", compaction=_OPTED_IN, simulator={"api": "llama.cpp"})
      for how in ("stream", "whole")),
    Group("ids", 2048, provider="openai", compaction=_OPTED_IN, simulator={"api": "llama.cpp"}),
    Group("ids-lms", 2048, provider="openai"),
]  # fmt: skip
_TAGS = ("alpha", "beta", "gamma", "delta")
_WORDS = 120


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A proxy with time to wait."""
    settings = {"summary_timeout_s": 300, "admission_timeout_s": 300}
    with open_bench(tmp_path_factory.mktemp("shared"), _GROUPS, settings) as bench:
        yield bench


def _words(tag: str) -> str:
    """Some 350 tokens."""
    return " ".join(f"{tag}{number}" for number in range(1, _WORDS + 1))


def _telling(call: ChatCall) -> Reply:
    """Says the words of the client that asks, and goes on behind those that it is shown."""
    if is_summary_call(call.body):
        return Reply(SUMMARY)
    text = _words(next(tag for tag in _TAGS if f"Tell {tag}." in call.sent_text))
    # In the ways to go on the answer so far is the last message of its role, if not the last of all.
    begun = [str(message.get("content")).rstrip() for message in call.messages if message["role"] == "assistant"]
    return Reply(text[text.index(begun[-1][-40:]) + len(begun[-1][-40:]) :] if begun else text)


def _asked(tag: str, prompt_tokens: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{prose(f'{tag} before', prompt_tokens)}\n\nTell {tag}."}]


def _answer(shared: Bench, name: str, tag: str, *, stream: bool) -> str:
    messages = _asked(tag, 870)
    if stream:
        return without_restarts(shared.proxy.stream(name, messages).text)
    content: str = shared.proxy.chat(name, messages).json()["choices"][0]["message"]["content"]
    return content


@pytest.mark.parametrize(("kind", "stream"), [("slots", True), ("slots", False), ("old", True)])
def test_four_answers_over_one_unified_cache_are_whole(shared: Bench, kind: str, stream: bool) -> None:
    """Four of 350 tokens behind 870 of prompt in 4,096: at once they were none of four, each ended by the others."""
    name = "old" if kind == "old" else f"slots-{'stream' if stream else 'whole'}"
    watch = shared.watch(name, _telling)

    with ThreadPoolExecutor(len(_TAGS)) as clients:
        answers = list(clients.map(lambda tag: _answer(shared, name, tag, stream=stream), _TAGS))
    assert answers == [_words(tag) for tag in _TAGS], [record.outcome for record in watch.chats]
    assert watch.summaries == []
    if kind == "slots":
        assert "pool_overflow" not in {record.outcome for record in watch.records}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_the_one_answer_that_lm_studio_writes_has_all_the_room(shared: Bench, stream: bool) -> None:
    """LM Studio, which has no field for more; of another server each answer has its part."""

    def bound_of(name: str) -> int:
        watch = shared.watch(name)
        asked = [{"role": "user", "content": "Hello."}]
        if stream:
            assert shared.proxy.stream(name, asked, n=4).finish_reasons == ["stop"]
        else:
            assert len(shared.proxy.chat(name, asked, n=4).json()["choices"]) == 1
        bound: int = watch.bodies[-1]["max_tokens"]
        return bound

    most = 8192 - 200
    assert bound_of("alike") > most
    single = f"single-{'stream' if stream else 'whole'}"
    assert bound_of(single) < 8192 / 4


@pytest.mark.parametrize(
    ("prompt", "asked", "bound"),
    [
        ([7] * 1000, {}, 2048 - 1000 - 64),
        ([7] * 1700, {"max_tokens": 100_000}, 2048 - 1700 - 64),
        ([[7] * 1000], {"stream": True, "max_tokens": 50}, 50),
        # One text, and side by side in one context.
        ([[7] * 600, [8] * 100], {}, 2048 - 700 - 64),
    ],
)
@pytest.mark.parametrize("name", ["ids", "ids-lms"])
def test_prompts_of_token_ids_are_bounded(
    shared: Bench, name: str, prompt: list[Any], asked: dict[str, Any], bound: int
) -> None:
    """Near the window, on the way to a server that takes them and to one that does not: as they came, but for that."""
    watch = shared.watch(name)
    bound //= len(prompt) if name == "ids" and isinstance(prompt[0], list) else 1
    answer = shared.proxy.post({"model": name, "prompt": prompt, **asked}, "/v1/completions")
    (record,) = watch.records_of("/v1/completions")
    assert record.body is not None
    assert (record.body["prompt"], record.body["max_tokens"]) == (prompt, bound)
    assert answer.status_code == (200 if name == "ids" else 400)
    if name == "ids":
        assert record.prompt_tokens == sum(len(each) if isinstance(each, list) else 1 for each in prompt)
        assert record.prompt_tokens + bound * (len(prompt) if isinstance(prompt[0], list) else 1) <= 2048
        assert record.outcome == "ok"


@pytest.mark.parametrize(
    ("name", "asked", "says"),
    [
        *(
            (name, {"prompt": prompt}, "This model's maximum context length is 2048 tokens")
            for name in ("ids", "ids-lms")
            for prompt in ([7] * 1800, [[7], [7] * 1800], [[7]] * 2000)
        ),
        # Text that the server completes itself: one that is too long, several prompts, several answers to one.
        ("ids", {"prompt": prose("giant", 3000)}, ""),
        ("ids", {"prompt": prose("giant", 3000), "stream": True}, ""),
        ("ids", {"prompt": [prose(str(number), 600) for number in range(4)]}, ""),
        ("ids", {"prompt": prose("one", 600), "n": 8}, "Ask for fewer at a time"),
    ],
)
def test_prompts_that_cannot_fit_are_refused(shared: Bench, name: str, asked: dict[str, Any], says: str) -> None:
    """With the numbers, before anything is sent, and the code that SDKs go by.

    What only several answers need is known behind LiteLLM's routing, which drops the code of a text completion's error.
    """
    watch = shared.watch(name)
    answer = shared.proxy.post({"model": name, **asked}, "/v1/completions")
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert says in error["message"]
    assert error["code"] == ("400" if "n" in asked else "context_length_exceeded")
    assert watch.records_of("/v1/completions") == []
