"""Threat: text that makes us work. Every pattern, and every walk over a conversation, takes linear time on any text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import httpx
import pytest

import litellm_compaction
from litellm_compaction import errors
from litellm_compaction.concurrency import is_long
from litellm_compaction.core import secrets
from litellm_compaction.core.messages import START_NOTICE, Request, _normal_form, parse_message, with_only_text
from litellm_compaction.engine import ask, build, compactor, measure
from litellm_compaction.engine.measure import RequestMeasurer
from litellm_compaction.proxy import call, wire
from litellm_compaction.proxy.answer.sse import ERROR_BYTES
from litellm_compaction.proxy.metrics import MAX_MODELS, Metrics
from litellm_compaction.recall import search
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokenizers.sources import Sources
from litellm_compaction.tokenizers.vocabulary import Vocabulary
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Target, Windows
from tests.proxy.answer.wired import Wire
from tests.proxy.test_metrics import FakeLibrary
from tests.recall.test_index import indexed, talk
from tests.security import patterns
from tests.security.beside.identities import auth_of, metadata_of
from tests.security.bounded import in_child
from tests.security.hooks import BASE, ROUTES, Client, Logging, Route, Scene, use_router
from tests.stores.made import MemoryStore
from tests.test_events import event

# LiteLLM's own.
pytestmark = pytest.mark.filterwarnings("ignore:.*`ReadOnly` qualifier:UserWarning")
# One look, which other threads and the event loop have to wait for, and 1 MB, in a thread: in plain searches of 1 MB,
# some 16 ms each. The slowest patterns take 34 and 139 (measured 2026-11-28).
_MOST_LOOK, _MOST_WHOLE = 100, 1_000
# Processor clocks of virtual machines step by up to 20 ms: a shorter time says nothing of growth.
_LEAST_TOLD_S = 0.02
_MOST_GROWTH = 8.0


def test_every_pattern_of_the_package_takes_linear_time_on_hostile_text() -> None:
    """1 MB made of a pattern's own parts, for each of them: four times the text takes about four times as long."""
    code = "from tests.security.patterns import report; print(json.dumps(report(**given)))"
    found = list(map(patterns.as_json, patterns.patterns(litellm_compaction)))
    rows = in_child(code, {"given": found}, cpu_s=180)
    assert len(rows) > 60, "the package's patterns are not found any more"
    for name, row in rows.items():
        grows = row["long_s"] > _MOST_GROWTH * max(row["short_s"], _LEAST_TOLD_S)
        assert not grows, f"{name} is worse than linear: {row}"
        assert row["look"] < _MOST_LOOK, f"{name} holds up everybody: {row}"
        assert row["whole"] < _MOST_WHOLE, f"{name} is too slow: {row}"


# (text of an assistant's message, of a summary and of a partial answer): a head, a unit and how often.
_REASONING = {
    "openings without an end (froze the proxy for 13 s)": "<think>" * 140_000,
    "long openings": "<thinking>" * 100_000,
    "openings, one end": "<think>" * 140_000 + "</think>",
    "ends without an opening": "</think>" * 125_000,
    "pairs": "<think></think>" * 66_000,
    "halves": "<think" * 160_000,
    "nested": "<think>" * 70_000 + "</think>" * 60_000,
    "lines": "\n<think>" * 125_000,
    "fenced lines (0.8 s for 20 KB)": "```\n<think>\n" * 80_000,
    "open fences": "```x\n" * 200_000 + "<think>\n" * 10,
    "marks": "`" * 1_000_000,
    "space behind an end": "<think></think>" + " " * 1_000_000 + "x",
    "upper case": "<THINK>" * 140_000,
}
_WALKS = """
import time
from litellm_compaction.core import clearing, excerpts, ledger, messages, prompts, record, secrets
from litellm_compaction.core.continuation import text as inside
def tokens(text): return len(text) // 4
def message(role, text): return messages.parse_message({"role": role, "content": text})
def read(text): return record.read_record(message("user", "## Session Summary" + text))
def kept(role):
    return lambda text: ledger.ledger(
        [message(role, text)], budget_tokens=2_000, count=tokens)
walks = {
    "summary": prompts.read_summary,
    "edited": lambda text: clearing.edited([message("assistant", text)], ()),
    "open_think": inside.open_think,
    "open_fence": inside.open_fence,
    "defused": prompts.defused,
    "chain": lambda text: messages.chain([message("assistant", text)]),
    "notices": messages.without_notices,
    "record": read,
    "refusal": prompts.is_refusal,
    "user's ledger": kept("user"),
    "result's ledger": kept("tool"),
    "assistant's ledger": kept("assistant"),
    "names": ledger.named,
    "rendered": lambda text: prompts.render_message(message("tool", text)),
    "redacted": secrets.redacted,
    "excerpt": lambda text: excerpts.excerpt(text, 500, tokens),
}
found = {}
def seconds(run, text):
    begun_s = time.process_time()
    run(text)
    return time.process_time() - begun_s
for name, text in given["texts"].items():
    for walk, run in walks.items():
        # Where even quadratic work would not reach the limit with the whole, the whole is not tried: an eighth, both
        # ends of it, costs a 64th of it then; nor where a 32nd, as far from the eighth, tells that it is linear.
        def ends(parts):
            end_chars = len(text) // (2 * parts)
            return seconds(run, text[:end_chars] + text[-end_chars:])
        eighth_s = ends(8)
        most_s = 64 * eighth_s
        if most_s >= given["limit_s"]:
            most_s = 8 * eighth_s if eighth_s < given["most_growth"] * ends(32) else seconds(run, text)
        found[f"{walk} of {name}"] = most_s
print(json.dumps(found))
"""
_ODD_TEXTS = {
    "spaces": " " * 1_000_000,
    "line breaks": "\n" * 1_000_000,
    "words": "ab " * 333_000,
    "one word": "a" * 1_000_000,
    "digits": "1" * 1_000_000,
    "values": "a=1 " * 250_000,
    "equals": "=" * 1_000_000,
    "Chinese values": "成" * 1_000_000,
    "named Chinese values": "端口是8" * 250_000,
    "slashes": "/" * 1_000_000,
    "paths": "a/b.py:1 " * 110_000,
    "control tokens": "<|im_start|>" * 80_000,
    "halves of control tokens": "<|" * 500_000,
    "notices": "⚙️ Compacting conversation history...\n" * 25_000,
    "error names": ".Error" * 160_000,
    "underscores": "_" * 1_000_000,
    "emoji": "👩‍👩‍👧" * 200_000,
    "surrogates": "\ud83d" * 1_000_000,
    "zero width": "\u200b" * 1_000_000,
    "combining": "e" + "\u0301" * 1_000_000,
    "backquotes": "`a" * 500_000,
    "records": "\n## Session Summary (round 1)\n[BEGIN RECORD OF EARLIER CONVERSATION]" * 14_000,
}


@pytest.mark.parametrize("texts", [_REASONING, _ODD_TEXTS], ids=["reasoning", "odd"])
def test_every_walk_over_a_conversation_is_linear(texts: dict[str, str]) -> None:
    """1 MB of each text takes under 15 s of processor time in each function; quadratic work would take hours."""
    limit_s = 15
    given = {"texts": texts, "limit_s": limit_s, "most_growth": _MOST_GROWTH}
    for name, seconds in in_child(_WALKS, given, cpu_s=240).items():
        assert seconds < limit_s, f"{name}: {seconds} s for 1 MB"


_WORDS = "some words of a text "
_FILL = _WORDS * 250_000
_HI = {"role": "user", "content": "What is next?"}
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
}
_ONE_OF_MANY = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
# What is sent to a window of 8,192 tokens, 4 to 5 MB each; whether something can be made of it.
_GIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "newest message": ({"messages": [{"role": "user", "content": _FILL}]}, False),
    "old message": (
        {"messages": [{"role": "user", "content": _FILL}, {"role": "assistant", "content": "x"}, _HI]},
        True,
    ),
    "many old messages": (
        {
            "messages": [
                *[{"role": r, "content": _WORDS * 2_000} for _ in range(64) for r in ("user", "assistant")],
                _HI,
            ]
        },
        True,
    ),
    "system message": ({"messages": [{"role": "system", "content": _FILL}, _HI]}, False),
    "result": ({"messages": [_HI, _CALL, {"role": "tool", "tool_call_id": "c", "content": _FILL}]}, False),
    "arguments": (
        {
            "messages": [
                _HI,
                {
                    **_CALL,
                    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": json.dumps({"x": _FILL})}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "x"},
            ]
        },
        False,
    ),
    "one tool": (
        {"messages": [_HI], "tools": [{"type": "function", "function": {"name": "f", "description": _FILL}}]},
        False,
    ),
    "many tools": ({"messages": [_HI], "tools": [_ONE_OF_MANY] * 40_000}, False),
}


@pytest.mark.parametrize(("giant", "group"), [*((giant, "carried") for giant in _GIANTS), ("old message", "hooked")])
async def test_what_no_window_holds_is_not_counted_to_its_end(
    giant: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 MB took 7 s of processor time to be refused; now as much is counted as could be tokens of the window."""
    body, can_be_made = _GIANTS[giant]
    counted = [0]
    lengths = Vocabulary.lengths

    def counting(vocabulary: Vocabulary, texts: Iterable[str]) -> list[int]:
        listed = list(texts)
        counted[0] += sum(map(len, listed))
        return lengths(vocabulary, listed)

    monkeypatch.setattr(Vocabulary, "lengths", counting)
    scene = Scene()
    use_router(monkeypatch, scene.router)
    for entry in scene.router.entries.values():
        entry["model_info"]["compaction"].update({"context_length": 8192, "enabled": True})
    asked = Client(scene, "sk-alice", body["messages"], attempts=[group], body={**body})
    await asked.send()
    assert 0 < counted[0] < 4_000_000
    if can_be_made:
        assert asked.error is None
        assert asked.headers["x-litellm-compaction"] == "compacted"
        assert len(json.dumps(asked.sent)) < 100_000
    else:
        assert "maximum context length is 8192 tokens" in str(asked.error)


async def test_what_decides_is_counted_exactly_beside_what_does_not() -> None:
    """The old part of a giant conversation is estimated; the floor, and what is newest, is what it would be alone."""
    counter, key = TokenCounter(), "k"
    family = family_of("", "llama-3.1-8b")
    measurer = RequestMeasurer(windows=Windows(cache_s=1), counter=counter, sources=Sources())
    system, old = {"role": "system", "content": "Be brief."}, {"role": "user", "content": _WORDS * 1_000}
    newest = [{"role": "assistant", "content": "Read."}, {"role": "user", "content": "And now 12 things?"}]
    short = Request(messages=tuple(map(parse_message, [system, old, *newest])), tools=(_ONE_OF_MANY,))
    giant = replace(short, messages=(short.messages[0], with_only_text(short.messages[1], _FILL), *short.messages[2:]))
    alone = await counter.count(key, family, short)
    target = Target(key=key, model="llama-3.1-8b", api_base=None, api_key=None, context_length=None)
    count = await measurer._count(target, family, giant, 8192)
    assert (count.sizes[0], *count.sizes[2:], count.tools_tokens) == (
        alone.sizes[0],
        *alone.sizes[2:],
        alone.tools_tokens,
    )
    assert count.sizes[1] == pytest.approx(1_250_000, rel=0.1)
    assert count.tokens == count.overhead_tokens + count.tools_tokens + sum(count.sizes)
    assert not count.exact
    assert count.fingerprint == 0


async def test_white_space_around_a_text_makes_no_giant() -> None:
    """Templates leave it out: a request that is nothing else is counted, and not estimated."""
    measurer = RequestMeasurer(windows=Windows(cache_s=1), counter=TokenCounter(), sources=Sources())
    target = Target(key="k", model="llama-3.1-8b", api_base=None, api_key=None, context_length=None)
    blank = Request(messages=(parse_message({"role": "user", "content": "Hello." + " \n" * 1_500_000}),))
    count = await measurer._count(target, family_of("", "llama-3.1-8b"), blank, 8192)
    assert count.exact
    assert count.tokens < 100


async def test_long_text_by_itself_is_estimated_by_pieces_of_it() -> None:
    """Within a tenth of the exact number, at the cost of 128 kB."""
    family = family_of("", "llama-3.1-8b")
    text = _WORDS * 50_000 + "1234567890 " * 50_000
    counter = TokenCounter()
    assert counter.text_counter("k", family)(text) == pytest.approx(
        await counter.count_text("k", family, text), rel=0.1
    )


_TINY = [{"role": ("user", "assistant")[number % 2], "content": f"go on {number}"} for number in range(4_001)]
_IN_PARTS = [{"role": "user", "content": [{"type": "text", "text": "go on"}] * 4_000}]
_MANY_CALLS = [_HI, {**_CALL, "tool_calls": _CALL["tool_calls"] * 4_000}, _HI]
_READERS = {
    wire: ("decode", "decode_prompt", "longest_ids", "with_prompt", "client_texts", "is_plain", "is_same_request"),
    call.Call: ("is_of",),
    compactor: ("plan",),
    measure: ("apply", "_sample"),
    build: ("verbatim", "apply"),
    ask: ("apply", "appended"),
}


def _is_long(given: object) -> bool:
    if isinstance(given, dict):
        return is_long(given.get("messages"), given.get("prompt"), [given.get("prompt")])
    return is_long(getattr(given, "messages", given))


def _watched(
    monkeypatch: pytest.MonkeyPatch, of_size: Callable[[object], bool] = lambda _: True
) -> dict[str, set[bool]]:
    """Of each function that walks over a request: whether it has run in the event loop's thread, and in another."""
    on_loop: dict[str, set[bool]] = {}
    here = threading.get_ident()

    def watch(owner: Any, name: str) -> None:
        run = getattr(owner, name)

        def watched(*given: Any, **named: Any) -> Any:
            if any(map(of_size, given)):
                on_loop.setdefault(name, set()).add(threading.get_ident() == here)
            return run(*given, **named)

        monkeypatch.setattr(owner, name, watched)

    for owner, names in _READERS.items():
        for name in names:
            watch(owner, name)
    return on_loop


def _large(monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene()
    use_router(monkeypatch, scene.router)
    for entry in scene.router.entries.values():
        entry["model_info"]["compaction"].update({"context_length": 8192, "enabled": True})
    return scene


async def _sent(
    monkeypatch: pytest.MonkeyPatch, messages: list[dict[str, Any]], group: str, route: Route = "acompletion"
) -> Client:
    client = Client(_large(monkeypatch), "sk-alice", messages, attempts=[group], route=route)
    await client.send()
    return client


@pytest.mark.parametrize("group", ["carried", "hooked"])
@pytest.mark.parametrize("messages", [_TINY, _IN_PARTS, _MANY_CALLS], ids=["messages", "parts", "calls"])
async def test_a_long_request_is_read_beside_the_event_loop(
    messages: list[dict[str, Any]], group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading 40,000 messages took 0.7 s, and deciding about them 0.8 s, in which the proxy served nobody."""
    on_loop = _watched(monkeypatch, _is_long)
    await _sent(monkeypatch, messages, group)
    assert {"decode", "client_texts", "_sample"} <= on_loop.keys()
    assert {name: where for name, where in on_loop.items() if True in where} == {}


@pytest.mark.parametrize("group", ["carried", "hooked"])
@pytest.mark.parametrize("route", [route for route in ROUTES if route != "acompletion"])
async def test_a_long_request_of_another_route_is_read_beside_the_event_loop(
    route: Route, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LiteLLM shows the messages of these only at the deployment, when it has made a chat of them."""
    on_loop = _watched(monkeypatch, _is_long)
    client = await _sent(monkeypatch, _TINY[:1001], group, route)
    assert client.error is None
    assert {"decode", "client_texts", "_sample"} <= on_loop.keys()
    assert {name: where for name, where in on_loop.items() if True in where} == {}


# Of text completions: many texts, one of 1 MB, and ids of tokens in both shapes.
_PROMPTS: dict[str, Any] = {
    "texts": ["go on"] * 1000,
    "a text": "go on " * 170_000,
    "ids": [7] * 5000,
    "lists of ids": [[7] * 5000],
}


@pytest.mark.parametrize("provider", ["openai", "text-completion-openai", "deepseek"])
@pytest.mark.parametrize("prompt", _PROMPTS)
async def test_a_long_prompt_is_read_beside_the_event_loop(
    prompt: str, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before routing, at the deployment, and where the transport sees what leaves."""
    scene = _large(monkeypatch)
    entry = scene.router.entries["hooked" if provider == "deepseek" else "carried"]
    entry["litellm_params"]["model"] = f"{provider}/test"
    on_loop = _watched(monkeypatch, _is_long)
    given = {"prompt": _PROMPTS[prompt], "litellm_logging_obj": Logging("t1"), "metadata": metadata_of("sk-alice")}
    data: dict[str, Any] = {"model": entry["model_name"], **given}
    with contextlib.suppress(Exception):
        # A prompt that fits nowhere is refused here.
        await scene.handler.async_pre_call_hook(auth_of("sk-alice"), None, data, "atext_completion")
    kwargs = {**entry["litellm_params"], **given, "model_info": entry["model_info"]}
    changed = None
    with contextlib.suppress(Exception):
        changed = await scene.handler.async_pre_call_deployment_hook(kwargs, "atext_completion")
    if changed is not None and changed.get("client") is not None:
        content = json.dumps({"model": "test", "prompt": _PROMPTS[prompt]}).encode()
        asked = httpx.Request("POST", f"{BASE}/completions", content=content)
        await changed["client"].transport.handle_async_request(asked)
        assert {"decode_prompt", "longest_ids"} <= on_loop.keys()
    # What is no chat is not looked at for one.
    on_loop.pop("decode")
    assert "decode_prompt" in on_loop
    assert {name: where for name, where in on_loop.items() if True in where} == {}


@pytest.mark.parametrize("said", ["exceeded ", "context size has been ", "成 exceeded", "x"])
def test_an_error_is_compared_with_few_places_of_what_the_client_said(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a server quotes its client: taking 50 MB apart for that would hold everybody up."""
    taken: list[int] = []
    words = errors._words
    monkeypatch.setattr(errors, "_words", lambda text: (taken.append(len(text)), words(text))[1])
    overflow = "the context size has been exceeded"
    errors.overflow_from_text(overflow, said * 1_000_000)
    assert sum(taken) < 500_000
    for text in (overflow.upper(), overflow.replace(" ", '\\" - \\"'), f"{'exceeded ' * 99}{overflow}"):
        assert errors.overflow_from_text(overflow, f"{'x ' * 9999}{text}{' y' * 9999}") is None
    assert errors.overflow_from_text(overflow, f"{'x ' * 9999} the size has been exceeded") is not None


@pytest.mark.parametrize("group", ["carried", "hooked"])
async def test_a_short_request_waits_for_no_thread(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread costs more than the work that it would take over."""
    on_loop = _watched(monkeypatch)
    await _sent(monkeypatch, [_HI], group)
    assert {"decode", "client_texts", "_sample"} <= on_loop.keys()
    assert {name: where for name, where in on_loop.items() if False in where} == {}


async def test_a_thread_that_reads_a_request_is_not_waited_for_where_its_client_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends by itself, and nothing is remembered of the request."""
    begun, may_end = asyncio.Event(), threading.Event()
    loop, decode = asyncio.get_running_loop(), wire.decode

    def slow(body: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        may_end.wait()
        return decode(body)

    monkeypatch.setattr(wire, "decode", slow)
    scene = Scene()
    use_router(monkeypatch, scene.router)
    for entry in scene.router.entries.values():
        entry["model_info"]["compaction"].update({"context_length": 8192, "enabled": True})
    sending = loop.create_task(Client(scene, "sk-alice", _TINY, body={"messages": _TINY}).send())
    await begun.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    may_end.set()
    assert not scene.calls._calls


# 3 MB of each: what is looked at in one call must not grow with it.
_LONG = {
    "words": _WORDS * 150_000,
    "notices": f"{START_NOTICE}\n" * 70_000,
    "Chinese": "成文字的内容 " * 400_000,
    "keys": "private key -----BEGIN " * 130_000,
}


@pytest.mark.parametrize("text", _LONG.values(), ids=_LONG.keys())
def test_a_long_text_is_hashed_in_slices_as_if_it_were_whole(text: str) -> None:
    """JSON of 50 MB is written in one call, which holds everybody up for 0.6 s; the hash is what it was."""
    message = parse_message({"role": "user", "content": text})
    pieces = list(_normal_form(message))
    assert max(map(len, pieces)) <= 6 * 262_144
    whole = json.dumps(["user", text.strip(), [], "", []], ensure_ascii=True, separators=(",", ":"))
    assert b"".join(pieces) == whole.encode()


def test_secrets_are_looked_for_in_slices() -> None:
    """Looking for 80 words in 50 MB took 2.9 s; one that lies across two slices is found all the same."""
    key = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEow" * 50 + "\n-----END RSA PRIVATE KEY-----"
    for edge in (32_768, 65_536):
        for shift in range(0, 40, 3):
            text = "x" * (edge - shift) + key + " ghp_" + "a1B2" * 9 + " " + "y" * 40_000
            assert "MIIEow" not in secrets.redacted(text)
            assert "a1B2" not in secrets.redacted("x " * ((edge - shift) // 2) + " ghp_" + "a1B2" * 9 + " y" * 40_000)


def test_names_that_clients_invent_make_no_new_metrics() -> None:
    """Of ten thousand, under a wildcard deployment, 200 have a label of their own and the others one together."""
    library = FakeLibrary()
    metrics = Metrics(lambda: library)
    for number in range(10_000):
        metrics.observe(event(model=f"model {number}"))
        metrics.restarted(f"model {number}", 1)
    for name, series in library.made.items():
        assert len({labels[0] for labels in series}) <= MAX_MODELS + 1, name
        assert len(series) <= MAX_MODELS + 1, name
    assert len(library.made["litellm_compaction_compactions_total"]) == MAX_MODELS + 1


_QUERIES = {
    "one letter": "x",
    "two letters": "ab",
    "words": "walrus ",
    "an id": "x9_y",
    "ids": "x9_y ",
    "umlauts": "ä",
    "Chinese": "成文字",
    "letters that are two without their case": "ŉ",
    "signs": "=>",
}


@pytest.mark.parametrize("part", _QUERIES.values(), ids=_QUERIES.keys())
def test_a_query_that_nothing_answers_takes_time_in_proportion_to_its_length(part: str) -> None:
    """Twice the query takes about twice as long, with the limit of time that is in use."""
    index = indexed(*talk(["abc " * 2_000, "ABC ẞa " * 2_000]))

    def seconds(chars: int) -> float:
        begun_s = time.thread_time()
        assert not search(index, (part * chars)[:chars]).hits
        return time.thread_time() - begun_s

    seconds(8)
    short_s, long_s = seconds(1_900), seconds(3_800)
    assert long_s < 3 * max(short_s, _LEAST_TOLD_S)


_EVERYTHING = "stream, streaming, stream_options and include_usage are unknown. "


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_server_that_refuses_whatever_it_is_sent_is_asked_a_few_times(streamed: bool) -> None:
    """Each addition of ours is left out once, whatever an error names and however often it comes."""
    wire = Wire([lambda: httpx.Response(400, json={"error": {"message": _EVERYTHING}})] * 50)
    assert (await wire.ask(stream=streamed)).status_code == 400
    assert len(wire.sent) <= 3


async def test_of_a_giant_refusal_only_the_beginning_is_looked_at() -> None:
    """What an error names behind its bound teaches nothing, and is not read."""
    wire = Wire([lambda: httpx.Response(400, content=b"no " * ERROR_BYTES + _EVERYTHING.encode())] * 2)
    assert (await wire.ask()).status_code == 400
    assert len(wire.sent) == 1


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
async def test_a_clock_that_jumps_frees_no_window_and_forgets_no_record(jump_s: float) -> None:
    """A limit that was learned holds on, and what is kept for a week is kept: only monotonic time ages windows."""
    now_s = [1_800_000_000.0]
    store = MemoryStore(ttl_s=7 * 86_400.0, max_bytes=1 << 20, clock=lambda: now_s[0])
    windows = Windows(cache_s=5)
    target = Target(key="k", model="m", api_base=None, api_key=None, context_length=8192)
    await store.put_fact("s", "before", "kept")
    windows.learn(target, 4096)
    with pytest.MonkeyPatch.context() as patch:
        now_s[0] += jump_s
        patch.setattr("time.time", lambda: now_s[0])
        assert (await windows.resolve(target)).tokens == 4096
        await store.put_fact("s", "after", "kept")
        assert [await store.get_fact("s", key) for key in ("before", "after")] == ["kept", "kept"]
        now_s[0] -= jump_s
        assert [await store.get_fact("s", key) for key in ("before", "after")] == ["kept", "kept"]
        assert (await windows.resolve(target)).tokens == 4096
