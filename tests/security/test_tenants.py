"""Threat: one tenant reads, changes or spends what is another's (issue 12, promise P9)."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import httpx
import pytest

from litellm_compaction.core.messages import Request
from litellm_compaction.engine import Attempts
from litellm_compaction.proxy.call import Call, ClientRequest
from litellm_compaction.proxy.deployments import tenant_of
from litellm_compaction.simulator import ChatCall, Gate, Reply
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import TokenCounter
from tests.builders import ONE_ROUND, parsed, talk, tools
from tests.integration.bench import Bench, is_summary_call
from tests.integration.harness import CHAT
from tests.security.beside.identities import IDENTITIES
from tests.security.hooks import (
    ROUTES,
    WINDOW,
    Client,
    Logging,
    RandomOrder,
    Route,
    Scene,
    conversation,
    pauses,
    use_router,
    words_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*`ReadOnly` qualifier:UserWarning")

# Rounds of clients at once: 10,000 of them take minutes (SECURITY.md), so that each run has some.
_INTERLEAVINGS = int(os.environ.get("TESTS_INTERLEAVINGS", "300"))
# Mostly two tenants, so that each pair meets alone, too.
_AT_ONCE = (2, 2, 2, 3, 6)
# What a client can write into `x-litellm-call-id`.
SHARED_IDS = ("t1", "", "0", "None", "a" * 4000, "☃", "sess\n1")
_PATHS = (
    ("carried",),
    ("hooked",),
    ("carried", "carried"),
    ("hooked", "carried"),
    ("carried", "hooked"),
    ("hooked", "foreign"),
)
_KEYS = ("sk-alice", "sk-bob", "sk-red-anna", "sk-blue-bert", "sk-key-only", "sk-other-key")


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """The callback with both carriers, around it no LiteLLM."""
    made = Scene()
    use_router(monkeypatch, made.router)
    return made


def test_two_tenants_under_one_call_id_never_meet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Random interleavings of two to six tenants at every suspension: every id, route, carrier, retry and fallback.

    Seen failing with `Calls` keyed by the client's id, and with one scope for all tenants (2026-11-23).
    """
    scene = Scene()
    use_router(monkeypatch, scene.router)
    # Room for a summary, so that models are asked on behalf of several tenants at once; with less, answers are cut.
    scene.router.entries["carried"]["model_info"]["compaction"]["context_length"] = 2 * WINDOW
    seed = int(os.environ.get("TESTS_SEED", "12"))
    loop = RandomOrder(random.Random(seed))
    try:
        actions = loop.run_until_complete(_interleaved(scene, random.Random(seed)))
    finally:
        loop.close()
    assert loop.choices >= 10 * _INTERLEAVINGS, "nothing is interleaved"
    assert not scene.calls._calls
    assert "failed_open" not in caplog.text
    # Most of the long conversations (six keys, seven each) are compacted for whoever comes first; one that joins a
    # compaction under way counts as reused.
    assert min(actions[action] for action in ("none", "reused", "compacted")) >= 21
    summaries = sum(is_summary_call(asked) for asked in scene.router.asked)
    assert summaries >= 21, "models are hardly asked for summaries"
    assert len(scene.router.asked) - summaries >= _INTERLEAVINGS // 10, "answers are hardly carried on"


async def _interleaved(scene: Scene, chance: random.Random) -> Counter[str]:
    """What was done to the requests of all rounds, each of which had its own tenant's text only."""
    actions: Counter[str] = Counter()
    for number in range(_INTERLEAVINGS):
        call_id = chance.choice(SHARED_IDS)
        clients = [
            Client(
                scene,
                key,
                _talk(key, number % 7, chance),
                call_id=call_id,
                attempts=chance.choice(_PATHS),
                route=chance.choice(ROUTES),
                stream=chance.random() < 0.5,
                is_cut=chance.random() < 0.5,
                pause=pauses(chance),
            )
            for key in chance.sample(_KEYS, chance.choice(_AT_ONCE))
        ]
        await asyncio.gather(*(client.send() for client in clients))
        for client in clients:
            own = words_of(client.messages)
            assert client.error is None
            for found in (words_of(client.sent), words_of(client.read)):
                assert own <= found
                # A ledger may keep a part of a word.
                assert [word for word in found if not any(each.startswith(word) for each in own)] == []
            actions[client.headers.get("x-litellm-compaction", "")] += 1
    return actions


def _talk(key: str, number: int, chance: random.Random) -> list[dict[str, Any]]:
    """A tenant's own conversation, or one that begins like everybody's and ends with a question of its own.

    Words begin with the number of their tenant, so that a part of one still says whose it is.
    """
    rounds = chance.choice((0, 1, 3, 4, 8))
    own = conversation(f"{_KEYS.index(key)}-{key}-{number}", rounds)
    if chance.random() < 0.5:
        return own
    return [*conversation(f"{len(_KEYS)}-all-{number}", rounds)[:-1], own[-1]]


async def test_what_is_remembered_ends_with_litellms_own_object(scene: Scene) -> None:
    """A client that leaves before any hook hears of it costs no memory; a name that it chose finds nothing."""
    log = Logging("t1")
    body = {"litellm_call_id": "t1", "litellm_logging_obj": log}
    call = scene.calls.open(body, _call("alice"))
    assert scene.calls.get(body) is call
    assert scene.calls.logged(log.model_call_details) is call
    forged = ("t1", {"model_call_details": {}}, ["t1"], None, 1)
    for name in forged:
        named = {"litellm_call_id": "t1", "litellm_logging_obj": name}
        assert scene.calls.get(named) is None
        scene.calls.open(named, _call("bob"))
        assert len(scene.calls._calls) == 1
    assert scene.calls.logged({"litellm_call_id": "t1"}) is None
    del body, log
    gc.collect()
    assert not scene.calls._calls


_KEPT = [{"role": "user", "content": "What is CANARY-alice doing?"}]
_OTHERS: tuple[tuple[str, str, list[Any]], ...] = (
    ("another tenant", "bob", _KEPT),
    ("another text", "alice", [{"role": "user", "content": "What is CANARY-bob doing?"}]),
    ("a message more", "alice", [*_KEPT, *_KEPT]),
    ("none", "alice", []),
    ("parts", "alice", [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
)


@pytest.mark.parametrize(("tenant", "messages"), [row[1:] for row in _OTHERS], ids=[row[0] for row in _OTHERS])
def test_remembered_messages_serve_only_the_same_tenant_and_messages(tenant: str, messages: list[Any]) -> None:
    """LiteLLM asks deployments on a request's behalf with other messages, too, and other callbacks change them."""
    call = _call("alice")
    call.leaves(_KEPT)
    assert call.is_of("alice", [dict(message) for message in _KEPT])
    assert not call.is_of(tenant, messages)


def test_messages_changed_in_place_are_other_messages() -> None:
    """As callbacks that mask what must not leave do it."""
    messages = [{"role": "user", "content": "My number is 4711."}]
    call = _call("alice")
    call.leaves(messages)
    messages[0]["content"] = "My number is <masked>."
    assert not call.is_of("alice", messages)


_LIMIT = "reached context length of 40 tokens"
_ROLES = "After the optional system message, only user, assistant and tool roles are supported, got {}."
_HI = {"role": "user", "content": "hi"}
# What a client sends, and what the server makes of it: chat templates and argument checks quote what they refuse.
_ECHOES: dict[str, tuple[dict[str, Any], Callable[[Any], str]]] = {
    "role": ({"messages": [_HI, {"role": _LIMIT, "content": "x"}]}, lambda body: _ROLES.format(_roles(body))),
    "role in quotes": ({"messages": [_HI, {"role": _LIMIT, "content": "x"}]}, lambda body: json.dumps(_roles(body))),
    "role, escaped twice": (
        {"messages": [_HI, {"role": f'"{_LIMIT}"', "content": "x"}]},
        lambda body: json.dumps(json.dumps(_roles(body))),
    ),
    "text": ({"messages": [{"role": "user", "content": f"Say: {_LIMIT}!"}]}, lambda body: f"bad text: Say: {_LIMIT}!"),
    "part": (
        {"messages": [{"role": "user", "content": [{"type": _LIMIT, "text": "hi"}]}]},
        lambda body: f"unknown part type {_LIMIT!r}",
    ),
    "tool": (
        {"messages": [_HI], "tools": [{"type": "function", "function": {"name": _LIMIT}}]},
        lambda body: f"tools.0.function.name: {_LIMIT}",
    ),
    "argument": ({"messages": [_HI], "stop": [_LIMIT]}, lambda body: f"stop must not be {_LIMIT!r}"),
    "key": ({"messages": [_HI], "logit_bias": {_LIMIT: 1}}, lambda body: f"logit_bias: {_LIMIT} is no token"),
    "near its own count": (
        {"messages": [{"role": "reached context length of 12 tokens", "content": "x"}]},
        lambda body: "got reached context length of 12 tokens",
    ),
    "5,000 digits": ({"messages": [_HI]}, lambda body: f"reached context length of {'9' * 5000} tokens"),
    "5,000 digits, echoed": (
        {"messages": [{"role": f"reached context length of {'4' * 5000} tokens", "content": "x"}]},
        lambda body: _ROLES.format(_roles(body)),
    ),
    "the server's own words, far from what it was sent": (
        {"messages": [_HI]},
        lambda body: "reached context length of 400 tokens",
    ),
    "nothing but words": (
        {"messages": [{"role": "Context size has been exceeded", "content": "x"}]},
        lambda body: _ROLES.format(_roles(body)),
    ),
}


def _roles(body: Any) -> str:
    return str(body["messages"][-1]["role"])


@pytest.mark.parametrize("group", ["carried", "hooked"])
@pytest.mark.parametrize("echo", _ECHOES)
async def test_client_teaches_nobody_a_window(
    scene: Scene, caplog: pytest.LogCaptureFixture, echo: str, group: str
) -> None:
    """Neither others nor itself: every window stays what the operator wrote."""
    body, refusal = _ECHOES[echo]
    for _ in range(3):
        await Client(scene, "sk-bob", body["messages"], attempts=[group], body=body, refusal=refusal).send()
    for key in ("sk-alice", "sk-bob"):
        asked = Client(scene, key, conversation(key, 1), attempts=[group])
        await asked.send()
        assert asked.error is None
        assert asked.headers["x-litellm-compaction-window"] == str(WINDOW)
    assert "failed_open" not in caplog.text


@pytest.mark.parametrize("group", ["carried", "hooked"])
async def test_true_limit_is_believed_for_whom_it_was_named(scene: Scene, group: str) -> None:
    """The server's own words, near what it was sent: for that tenant alone, and never below what was served since."""

    async def overflow(key: str) -> None:
        told = "reached context length of 600 tokens"
        await Client(scene, key, conversation(key, 2), attempts=[group], refusal=lambda body: told).send()

    async def window(key: str) -> str:
        asked = Client(scene, key, conversation(key, 0), attempts=[group])
        await asked.send()
        return asked.headers["x-litellm-compaction-window"]

    everybody = ("sk-bob", "sk-alice", "sk-red-anna")
    await overflow("sk-bob")
    await overflow("sk-bob")
    assert [await window(key) for key in everybody] == ["600", str(WINDOW), str(WINDOW)]
    await overflow("sk-alice")
    assert [await window(key) for key in everybody] == ["600", "600", str(WINDOW)]
    target = scene.handler._gate.guards.deployment(scene.router.entries[group]).target
    windows = scene.handler._compactor.windows
    for _, asker in [*windows._learned]:
        windows.served(replace(target, asker=asker), 601)
    assert [await window(key) for key in everybody] == [str(WINDOW)] * 3


def test_each_part_of_an_identity_tells_tenants_apart() -> None:
    """By itself, whatever else is known; a value of one part is not taken for another's."""
    names = ("team_id", "user_id", "hash")
    given = [{f"user_api_key_{name}": value} for name in names for value in ("a", "b")]
    assert len({tenant_of(metadata) for metadata in [*given, {}]}) == 7


async def test_keys_without_any_identity_share_nothing(scene: Scene) -> None:
    """Custom authentication may name neither key nor user nor team; what the client has shown tells them apart."""
    actions = []
    for key in ("sk-nobody.1", "sk-nobody.1", "sk-nobody.2"):
        client = Client(scene, key, conversation("same", 4))
        await client.send()
        actions.append(client.headers["x-litellm-compaction"])
    assert actions == ["compacted", "reused", "compacted"]


_ALICE: dict[str, Any] = {
    "user_api_key": "sk-alice",
    "user_api_key_hash": "sk-alice",
    "user_api_key_user_id": "alice",
    "user_api_key_end_user_id": "alice",
    "user_api_key_auth": {"api_key": "sk-alice", "user_id": "alice"},
    "model_group": "local",
}
# What somebody sends who wants to be taken for Alice: fields of the body, and headers.
_AS_ALICE: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "user": ({"user": "alice"}, {}),
    "metadata": ({"metadata": _ALICE}, {}),
    "metadata as text": ({"metadata": json.dumps(_ALICE)}, {}),
    "litellm_metadata": ({"litellm_metadata": _ALICE}, {}),
    "litellm_metadata as text": ({"litellm_metadata": json.dumps(_ALICE)}, {}),
    "both": ({"metadata": _ALICE, "litellm_metadata": _ALICE}, {}),
    "metadata in metadata": ({"metadata": {"metadata": _ALICE, "requester_metadata": _ALICE}}, {}),
    "the body itself": (_ALICE, {}),
    "litellm_params": ({"litellm_params": {"metadata": _ALICE, "litellm_metadata": _ALICE}}, {}),
    "metadata in extra_body": ({"extra_body": {"metadata": _ALICE}}, {}),
    "litellm_metadata in extra_body": ({"extra_body": {"litellm_metadata": _ALICE}}, {}),
    "user in extra_body": ({"extra_body": {"user": "alice"}}, {}),
    "proxy_server_request": ({"proxy_server_request": {"headers": {"authorization": "Bearer sk-alice"}}}, {}),
    "secret_fields": ({"secret_fields": {"raw_headers": {"authorization": "Bearer sk-alice"}}}, {}),
    "user_api_key_dict": ({"user_api_key_dict": {"user_id": "alice", "api_key": "sk-alice"}}, {}),
    "user_id": ({"user_id": "alice", "team_id": None, "end_user": "alice"}, {}),
    "logging object": ({"litellm_logging_obj": {"model_call_details": {"metadata": _ALICE}}}, {}),
    "call id": ({"litellm_call_id": "alice-1"}, {}),
    "session": ({"litellm_session_id": "alice-1", "litellm_trace_id": "alice-1"}, {}),
    "model_info": ({"model_info": {"id": "local", "team_id": "alice"}}, {}),
    "callback_settings": ({"callback_settings": {"litellm_compaction": {"scope": "alice"}}}, {}),
    "dynamic parameters": ({"standard_callback_dynamic_params": _ALICE}, {}),
    "cache": ({"cache": {"use-cache": True, "namespace": "alice"}}, {}),
    "cache key": ({"prompt_cache_key": "alice-1", "safety_identifier": "alice"}, {}),
    "fallbacks": ({"fallbacks": [{"model": "local", "metadata": _ALICE}]}, {}),
    "tags": ({"tags": ["User-Agent: alice", "alice"]}, {}),
    "header call id": ({}, {"x-litellm-call-id": "alice-1"}),
    "header user": ({}, {"x-litellm-user-id": "alice", "x-litellm-user": "alice"}),
    "header end user": ({}, {"x-litellm-end-user-id": "alice", "x-end-user-id": "alice"}),
    "header customer": ({}, {"x-litellm-customer-id": "alice"}),
    "header trace": ({}, {"x-litellm-trace-id": "alice-1", "x-litellm-session-id": "alice-1"}),
    "header tags": ({}, {"x-litellm-tags": "alice"}),
    "header agent": ({}, {"x-litellm-agent-id": "alice", "x-litellm-key-alias": "alice"}),
    "header team and organization": ({}, {"x-litellm-team-id": "alice", "x-litellm-org-id": "alice"}),
    "header of Open WebUI": ({}, {"x-openwebui-user-id": "alice", "x-openwebui-user-email": "alice"}),
    "header metadata": ({}, {"x-litellm-metadata": json.dumps(_ALICE)}),
    "a second key": ({}, {"x-api-key": "sk-alice", "api-key": "sk-alice"}),
}


@pytest.mark.parametrize("group", ["carried", "hooked"])
@pytest.mark.parametrize("route", ROUTES)
async def test_nobody_is_taken_for_another_on_any_route(scene: Scene, route: Route, group: str) -> None:
    """By us, without LiteLLM, which takes away most of these words before.

    Seen failing (2026-11-22): "litellm_metadata" on chat while that place was read first whatever it held; all rows
    without the tenant in the scope; those of keys without an identity without what the client has shown.
    """
    messages = conversation("alice", 4)

    async def action(key: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
        client = Client(
            scene, key, messages, body=body, shown=headers, attempts=[group], route=route, call_id="alice-1"
        )
        await client.send()
        assert client.error is None
        return client.headers["x-litellm-compaction"]

    assert [await action("sk-alice", {}, {}) for _ in range(2)] == ["compacted", "reused"]
    found: dict[str, str] = {}
    for number, (name, (body, headers)) in enumerate(_AS_ALICE.items()):
        for key in (f"sk-other-key.{number}", f"sk-nobody.{number}"):
            found[f"{name}, {key}"] = await action(key, body, headers)
    assert {name: done for name, done in found.items() if done != "compacted"} == {}
    assert await action("sk-alice", {}, {}) == "reused"


@pytest.mark.proxy
@pytest.mark.parametrize("group", ["local", "hooked"])
def test_nobody_is_taken_for_another_by_what_they_send(office: Bench, group: str) -> None:
    """Alice's record of a conversation is there, and serves her; whoever else sends it pays for one of their own."""
    office.watch(group, _seen)
    messages = talk(f"CANARY-alice spoofed {group}", ONE_ROUND)

    def action(key: str, body: dict[str, Any], headers: dict[str, str]) -> str:
        said = {"Authorization": f"Bearer {key}", **headers}
        asked = {"model": group, "messages": messages, "max_tokens": 50, **body}
        answer = office.proxy.client.post(CHAT, content=json.dumps(asked).encode(), headers=said)
        return answer.headers.get("x-litellm-compaction", "") if answer.status_code == 200 else str(answer.status_code)

    assert [action("sk-alice", {}, {}) for _ in range(2)] == ["compacted", "reused"]
    # Each with a key, and so a scope, of its own.
    rows = enumerate(_AS_ALICE.items())
    found = {name: action(f"sk-other-key.{group}{number}", *given) for number, (name, given) in rows}
    assert [name for name, done in found.items() if done not in ("compacted", "400", "401", "403", "422")] == []
    assert list(found.values()).count("compacted") >= 30, found
    assert action("sk-alice", {}, {}) == "reused"


async def test_a_record_serves_its_own_tenant_only(scene: Scene) -> None:
    """Of sixteen identities with the very same conversation only two of one team share a record."""
    actions = {}
    for key in IDENTITIES:
        client = Client(scene, key, conversation("same", 4), attempts=["hooked"])
        await client.send()
        actions[key] = client.headers["x-litellm-compaction"]
    assert actions == dict.fromkeys(IDENTITIES, "compacted") | {"sk-red-arno": "reused"}


async def test_who_knows_a_records_names_gets_no_record(scene: Scene) -> None:
    """Threat: guessed chain hashes. Even whoever has read the store cannot ask for one: no request names a record."""
    messages = conversation("alice", 4)
    await Client(scene, "sk-alice", messages, attempts=["hooked"]).send()
    [stored] = await scene.handler._store.compactions()
    named = {
        "scope": stored.scope,
        "covered_hash": stored.compaction.covered_hash,
    }
    said = {"x-litellm-compaction-record": stored.compaction.covered_hash, "x-litellm-compaction-scope": stored.scope}
    bodies: list[dict[str, Any]] = [named, {"metadata": named}, {"litellm_metadata": named}, {"extra_body": named}]
    for number, body in enumerate(bodies):
        # Another conversation of a stranger's, as long as hers: with her record the summary would be spared.
        theirs = conversation("bob", 4)
        stranger = Client(scene, f"sk-other-key.{number}", theirs, attempts=["hooked"], body=body, shown=said)
        await stranger.send()
        assert stranger.error is None
        assert stranger.headers["x-litellm-compaction"] == "compacted"
        assert "CANARY-alice" not in json.dumps(stranger.sent)


async def test_what_somebody_else_compacted_spares_a_stranger_nothing(scene: Scene) -> None:
    """Threat: a timing oracle, "did somebody else have this conversation compacted?".

    Before and after Alice's, and while hers is being made, a stranger pays the same calls for the same text.
    """
    router, messages = scene.router, conversation("alice", 20)
    router.entries["hooked"]["model_info"]["compaction"]["context_length"] = 4 * WINDOW

    async def paid(key: str, messages: list[dict[str, Any]] = messages) -> int:
        # Questions how long a prompt is count, too.
        before = len(router.asked)
        await Client(scene, key, messages, attempts=["hooked"]).send()
        return len(router.asked) - before

    # What is learned of the model, of whatever text, spares everybody a question.
    await paid("sk-other-key.warm", conversation("warm", 20))
    first = await paid("sk-other-key.before")
    assert first > 0
    assert await paid("sk-alice") == first
    assert await paid("sk-other-key.after") == first
    before, fresh = len(router.asked), conversation("alice-again", 20)
    together = [Client(scene, key, fresh, attempts=["hooked"]) for key in ("sk-alice", "sk-other-key.beside")]
    await asyncio.gather(*(client.send() for client in together))
    assert len(router.asked) - before == 2 * first


@pytest.mark.parametrize("model", ["qwen2.5-7b-instruct", "unheard-of"])
async def test_what_was_counted_for_another_tenant_is_counted_anew(model: str) -> None:
    """Threat: the time or the count of one's own request tells if somebody else has sent the same text.

    With a prompt that is rendered, and with one that a formula counts. Seen failing with one memory for all tenants
    (2026-11-24): through a proxy prompts of 24,000 characters took 86 ms and 113 ms, and the count was Alice's.
    """
    counter, family = TokenCounter(), family_of("", model)
    request = Request(messages=parsed(conversation("alice", 4)), tools=tuple(tools(2)))
    fresh = await TokenCounter().count("t", family, request, asker="bob")
    alice = await counter.count("t", family, request, asker="alice")
    counter._note_anchor("t", alice, alice.tokens + 100, is_sure=True)
    assert (await counter.count("t", family, request, asker="alice")).tokens == alice.tokens + 100
    memories = _sizes(counter)
    assert memories["texts"]
    assert alice.rendered is (model != "unheard-of")
    assert await counter.count("t", family, request, asker="bob") == replace(fresh, prints=ANY)
    assert _sizes(counter) == {name: 2 * size for name, size in memories.items()}
    count_text = {name: counter.text_counter("t", family, asker=name) for name in ("alice", "bob")}
    assert count_text["alice"]("one more") == count_text["bob"]("one more")


def _sizes(counter: TokenCounter) -> dict[str, int]:
    """Entries of all memories that a request's text is looked up in, but the server's numbers."""
    counting = counter._counting
    return {"texts": len(counting.texts._entries), "tools": len(counting._tools), "recent": len(counter._recent)}


# Larger than every number of `_LIES` that is to be no more than unlikely.
_LIED_WINDOW = 8192
# By what it is not believed: the rounds of what was asked, and what its server says of that, each time.
# A round is about 240 tokens. Seen failing with each of the named checks removed, and only the rows of that check.
_LIES: dict[str, tuple[int, list[Any]]] = {
    "above the window: ReplyReader.learn": (20, [{"prompt_tokens": _LIED_WINDOW + 1, "completion_tokens": 1}] * 4),
    "above it with its cache: ReplyReader.learn": (
        20,
        [{"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": _LIED_WINDOW}}] * 4,
    ),
    "cut: TokenCounter.is_suspicious": (20, [{"prompt_tokens": 2000, "completion_tokens": 1}] * 4),
    "no vocabulary has so many: is_plausible": (2, [{"prompt_tokens": 3000, "completion_tokens": 1}] * 4),
    "no vocabulary has so few: is_plausible": (3, [{"prompt_tokens": 210, "completion_tokens": 1}] * 4),
    "low for once: Calibration.believes": (2, [{"prompt_tokens": 220, "completion_tokens": 1}]),
    "no whole number: wire.usage_of": (2, [{"prompt_tokens": 1000.0, "completion_tokens": 1.0}] * 4),
    "nothing but a prompt: wire.usage_of": (2, [{"prompt_tokens": 1000}] * 4),
    # What would rather be an error than be believed.
    "huge": (1, [{"prompt_tokens": 10**9, "completion_tokens": 10**9}] * 4),
    "a huge answer": (1, [{"prompt_tokens": 1, "completion_tokens": 10**9}] * 4),
    "negative": (1, [{"prompt_tokens": -5, "completion_tokens": -5}] * 4),
    "nothing": (1, [{"prompt_tokens": 0, "completion_tokens": 0}] * 4),
    "truth values": (1, [{"prompt_tokens": True, "completion_tokens": True}] * 4),
    "text": (1, [{"prompt_tokens": "900", "completion_tokens": "1"}] * 4),
    "no number of tokens": (1, [{"prompt_tokens": 1e308, "completion_tokens": 1e308}] * 4),
    "lists": (1, [{"prompt_tokens": [9], "completion_tokens": {}}] * 4),
    "a list": (1, [[]] * 4),
    "a word": (1, ["all"] * 4),
}


async def _counted(scene: Scene, rounds: int) -> list[tuple[str, ...]]:
    """What Alice is told of a conversation of her own, and of one that goes on like Bob's first."""
    goes_on = [{"role": "assistant", "content": "Ported."}, {"role": "user", "content": "And then?"}]
    found = []
    for messages in (conversation("alice", rounds), [*conversation("bob-0", rounds), *goes_on]):
        asked = Client(scene, "sk-alice", messages)
        await asked.send()
        assert asked.error is None
        found.append(tuple(asked.headers[f"x-litellm-compaction{name}"] for name in ("", "-window", "-tokens-before")))
    return found


def _large(monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene()
    use_router(monkeypatch, scene.router)
    for entry in scene.router.entries.values():
        entry["model_info"]["compaction"].update({"context_length": _LIED_WINDOW, "enabled": True})
    return scene


async def _told(scene: Scene, rounds: int, usages: list[Any]) -> None:
    """Requests of Bob's, each with what their server says they took."""
    heard: list[Any] = []

    def told(body: Any, usage: Any) -> httpx.Response:
        heard.append(body)
        message = {"role": "assistant", "content": "Fine."}
        return httpx.Response(200, json={"id": "1", "choices": [{"index": 0, "message": message}], "usage": usage})

    for number, usage in enumerate(usages):
        scene.server.answer = lambda body, usage=usage: told(body, usage)
        await Client(scene, "sk-bob", conversation(f"bob-{number}", rounds)).send()
        assert len(heard) > number, "the lie was told"


@pytest.mark.parametrize("lie", _LIES)
async def test_a_server_that_lies_of_usage_to_one_changes_nothing_for_another(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither window nor count, whatever numbers came with another tenant's answers."""
    rounds, usages = _LIES[lie]
    expected = await _counted(_large(monkeypatch), rounds)
    scene = _large(monkeypatch)
    await _told(scene, rounds, usages)
    assert await _counted(scene, rounds) == expected


async def test_what_a_server_says_of_usage_is_believed_where_it_may_be_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the rows above show nothing: numbers are learned here, and by everybody who asks the deployment."""
    for tokens, expected in ((300, "fewer"), (1000, "more")):
        before = int((await _counted(_large(monkeypatch), 2))[0][-1])
        scene = _large(monkeypatch)
        await _told(scene, 2, [{"prompt_tokens": tokens, "completion_tokens": 1}] * 4)
        after = int((await _counted(scene, 2))[0][-1])
        assert ("more" if after > 1.5 * before else "fewer" if after < 0.7 * before else "as many") == expected


def _seen(call: ChatCall) -> Reply:
    """A model that says whose text it has seen."""
    said = f"Seen: {' '.join(sorted(words_of(call.messages)))}"
    return Reply(f"### Current state\n{said}" if is_summary_call(call.body) else said)


def _short(path: str, stream: bool) -> dict[str, Any]:
    text = "What is CANARY-bob doing?"
    if path == "/v1/responses":
        return {"input": text, "stream": stream}
    if path == "/v1/completions":
        return {"prompt": text, "stream": stream}
    return {"messages": [{"role": "user", "content": text}], "stream": stream, "max_tokens": 999}


@pytest.mark.proxy
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("group", ["local", "hooked"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/completions"])
def test_request_under_anothers_call_id_while_that_is_under_way(
    office: Bench, path: str, group: str, stream: bool
) -> None:
    """Alice's conversation is being summarised when Bob comes with her id: 6 of 6 were mixed up before."""
    gate = Gate()

    def script(call: ChatCall) -> Reply:
        reply = _seen(call)
        return replace(reply, gate=gate) if is_summary_call(call.body) else reply

    watch = office.watch(group, script)
    topic = f"CANARY-alice {path} {group} {stream}"
    headers = {"x-litellm-call-id": "t1"}

    def ask(key: str, path: str, body: dict[str, Any]) -> str:
        said = {"Authorization": f"Bearer {key}", **headers}
        if body["stream"]:
            return office.proxy.stream_body({"model": group, **body}, path, **said).raw.decode()
        return office.proxy.post({"model": group, **body}, path, headers=said).text

    with ThreadPoolExecutor(1) as pool:
        alice = pool.submit(ask, "sk-alice", CHAT, {"messages": talk(topic, ONE_ROUND), "stream": stream})
        assert gate.reached.wait(60)
        bob = ask("sk-bob", path, _short(path, stream))
        gate.open()
        heard = alice.result()
    assert words_of(bob) == {"CANARY-bob"}
    assert words_of(heard) == {"CANARY-alice"}
    assert [words for body in watch.bodies if len(words := words_of(body["messages"])) != 1] == []


def _call(tenant: str) -> Call:
    request = Request(messages=())
    client = ClientRequest(received=request, original=request, group="g", tenant=tenant)
    return Call(client, Attempts(summary_calls_left=1))
