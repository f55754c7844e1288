"""Threat: one tenant reads, changes or spends what is another's (promise P9), through LiteLLM's own application."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from litellm_compaction.proxy.client import tenant_of
from tests.integration.app import in_loop
from tests.integration.bench import Bench
from tests.integration.beside_config.identities import IDENTITIES
from tests.integration.harness import CHAT
from tests.integration.plain_server import PlainServer
from tests.security.office import ROUTES, action, ask, body_of, conversation, honest, said, seen, send, words_of

# Rounds of clients at once; 10,000 of them take an hour (SECURITY.md), so that each run has some.
_INTERLEAVINGS = int(os.environ.get("TESTS_INTERLEAVINGS", "20"))
# Mostly two tenants, so that each pair meets alone, too.
_AT_ONCE = (2, 2, 2, 3, 6)
# What a client can write into `x-litellm-call-id`.
SHARED_IDS = ("t1", "", "0", "None", "a" * 4000, "sess-1")
_KEYS = ("sk-alice", "sk-bob", "sk-red-anna", "sk-blue-bert", "sk-key-only", "sk-other-key")
# Of 4,096 tokens, by each carrier.
_INTERLEAVED = ("small", "foreign", "foreign-hooked")


def test_two_tenants_under_one_call_id_never_meet(office: Bench) -> None:
    """Two to six tenants at once, each a random number of steps after the others: every id, route and carrier."""
    watches = [office.watch(group, seen) for group in _INTERLEAVED]
    # The application is the one that is open.
    assert office.proxy.client.get("/health/liveliness").status_code == 200
    chance = random.Random(int(os.environ.get("TESTS_SEED", "12")))
    actions: Counter[str] = Counter()
    for number in range(_INTERLEAVINGS):
        actions += in_loop(_together(office, number, chance))
    assert office.proxy.logged("failed_open") == []
    assert min(actions[each] for each in ("none", "reused", "compacted")) >= _INTERLEAVINGS // 20, actions
    for body in (record.body or {} for watch in watches for record in watch.records):
        # What everybody's conversations begin with is the last number's.
        assert len({word[: len("CANARY-0")] for word in words_of(body)} - {f"CANARY-{len(_KEYS)}"}) <= 1


async def _together(office: Bench, number: int, chance: random.Random) -> Counter[str]:
    """What was done to the requests of several tenants at once, each of which was answered of its own text only."""
    call_id, asked = chance.choice(SHARED_IDS), []
    for key in chance.sample(_KEYS, chance.choice(_AT_ONCE)):
        group, stream = chance.choice(_INTERLEAVED), chance.random() < 0.5
        path = CHAT if group == "foreign" else chance.choice(ROUTES)
        messages = _talk(key, number % 3, chance)
        asked.append((key, path, messages, body_of(group, messages, path, stream=stream)))

    async def later(steps: int, key: str, path: str, body: dict[str, Any]) -> httpx.Response:
        for _ in range(steps):
            await asyncio.sleep(0)
        return await send(office, key, body, path, **{"x-litellm-call-id": call_id})

    answers = await asyncio.gather(*(later(chance.randrange(200), key, path, body) for key, path, _, body in asked))
    for (_, path, messages, body), answer in zip(asked, answers, strict=True):
        assert answer.status_code == 200, answer.text
        own, found = words_of(messages), words_of(answer.text.replace('"}}', " "))
        assert found, (body["model"], path, body["stream"], answer.text)
        # A ledger, or a piece of a stream, may have a part of a word.
        assert [word for word in found if not any(each.startswith(word) for each in own)] == []
    return Counter(answer.headers.get("x-litellm-compaction", "") for answer in answers)


def _talk(key: str, number: int, chance: random.Random) -> list[dict[str, Any]]:
    """A tenant's own conversation, or one that begins like everybody's and ends with a question of its own.

    Words begin with the number of their tenant, so that a part of one still says whose it is.
    """
    rounds = chance.choice((0, 4, 20, 30))
    own = conversation(f"{_KEYS.index(key)}-{key}-{number}", rounds)
    if chance.random() < 0.5:
        return own
    return [*conversation(f"{len(_KEYS)}-all-{number}", rounds)[:-1], own[-1]]


def test_each_part_of_an_identity_tells_tenants_apart() -> None:
    """By itself, whatever else is known; a value of one part is not taken for another's."""
    names = ("team_id", "user_id", "hash")
    given = [{f"user_api_key_{name}": value} for name in names for value in ("a", "b")]
    assert len({tenant_of(metadata) for metadata in [*given, {}]}) == 7


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
    "metadata in metadata": ({"metadata": {"metadata": _ALICE, "requester_metadata": _ALICE}}, {}),
    "the body itself": (_ALICE, {}),
    "litellm_params": ({"litellm_params": {"metadata": _ALICE, "litellm_metadata": _ALICE}}, {}),
    "metadata in extra_body": ({"extra_body": {"metadata": _ALICE}}, {}),
    "proxy_server_request": ({"proxy_server_request": {"headers": {"authorization": "Bearer sk-alice"}}}, {}),
    "secret_fields": ({"secret_fields": {"raw_headers": {"authorization": "Bearer sk-alice"}}}, {}),
    "user_id": ({"user_id": "alice", "team_id": None, "end_user": "alice"}, {}),
    "logging object": ({"litellm_logging_obj": {"model_call_details": {"metadata": _ALICE}}}, {}),
    "call id": ({"litellm_call_id": "alice-1"}, {}),
    "session": ({"litellm_session_id": "alice-1", "litellm_trace_id": "alice-1"}, {}),
    "callback_settings": ({"callback_settings": {"litellm_compaction": {"scope": "alice"}}}, {}),
    "fallbacks": ({"fallbacks": [{"model": "local", "metadata": _ALICE}]}, {}),
    "header call id": ({}, {"x-litellm-call-id": "alice-1"}),
    "header user": ({}, {"x-litellm-user-id": "alice", "x-litellm-user": "alice"}),
    "header end user": ({}, {"x-litellm-end-user-id": "alice", "x-end-user-id": "alice"}),
    "header tags": ({}, {"x-litellm-tags": "alice"}),
    "header team and organization": ({}, {"x-litellm-team-id": "alice", "x-litellm-org-id": "alice"}),
    "header of Open WebUI": ({}, {"x-openwebui-user-id": "alice", "x-openwebui-user-email": "alice"}),
    "header metadata": ({}, {"x-litellm-metadata": json.dumps(_ALICE)}),
    "a second key": ({}, {"x-api-key": "sk-alice", "api-key": "sk-alice"}),
}


@pytest.mark.parametrize(("group", "path"), [("small", "/v1/messages"), ("foreign-hooked", CHAT)])
def test_nobody_is_taken_for_another_by_what_they_send(office: Bench, group: str, path: str) -> None:
    """Alice's record of a conversation is there, and serves her; whoever else sends it pays for one of their own."""
    office.watch(group, seen)
    keys = ("sk-other-key", "sk-nobody") if group == "foreign-hooked" else ("sk-nobody",)
    messages = conversation(f"alice-spoofed-{group}-{ROUTES.index(path)}", 20)

    def done(key: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
        return action(ask(office, key, {**body_of(group, messages, path), **body}, path, **headers))

    assert [done("sk-alice", {}, {}) for _ in range(2)] == ["compacted", "reused"]
    # Each with a key, and so a scope, of its own; keys that name nobody are told apart by what the client has shown.
    found = {
        f"{name}, {key}": done(f"{key}.{group}{path}{number}", *given)
        for number, (name, given) in enumerate(_AS_ALICE.items())
        for key in keys
    }
    assert [name for name, each in found.items() if each not in ("compacted", "400", "401", "403", "422")] == []
    assert list(found.values()).count("compacted") >= 12 * len(keys), found
    assert done("sk-alice", {}, {}) == "reused"


def test_a_record_serves_its_own_tenant_only(office: Bench) -> None:
    """Of all identities with the very same conversation only two of one team share a record."""
    office.watch("small", seen)
    body = body_of("small", conversation("same", 20))
    actions = {key: action(ask(office, key, body)) for key in IDENTITIES if key != "sk-poor"}
    assert actions == dict.fromkeys(actions, "compacted") | {"sk-red-arno": "reused"}


def test_who_knows_a_records_names_gets_no_record(office: Bench) -> None:
    """Threat: guessed names. No request names a record, by its id, its digest or whatever else was told of it."""
    watch = office.watch("small", seen)
    told = ask(office, "sk-alice", body_of("small", conversation("alice-named", 20))).headers
    named = {name.rpartition("-")[2]: told[name] for name in told if name.startswith("x-litellm-compaction-")}
    assert {"record", "digest"} <= named.keys()
    shown = {f"x-litellm-compaction-{name}": value for name, value in named.items()}
    bodies: list[dict[str, Any]] = [named, {"metadata": named}, {"litellm_metadata": named}, {"extra_body": named}]
    for number, body in enumerate(bodies):
        # Another conversation of a stranger's, as long as hers: with her record the summary would be spared.
        theirs = body_of("small", conversation("bob", 20), **body)
        assert action(ask(office, f"sk-other-key.named{number}", theirs, **shown)) == "compacted"
    assert [body for body in watch.bodies[1:] if "CANARY-alice-named" in words_of(body)] == []


def test_what_somebody_else_compacted_spares_a_stranger_nothing(office: Bench) -> None:
    """Threat: a timing oracle, "did somebody else have this conversation compacted?".

    Before and after Alice's, and while hers is being made, a stranger pays the same calls for the same text.
    """
    watch = office.watch("small", seen)

    def paid(*keys: str, topic: str = "oracle") -> int:
        before, body = len(watch.records_of(CHAT)), body_of("small", conversation(topic, 20))

        async def together() -> None:
            await asyncio.gather(*(send(office, key, body) for key in keys))

        in_loop(together())
        return len(watch.records_of(CHAT)) - before

    assert office.proxy.client.get("/health/liveliness").status_code == 200
    # What is learned of the model, of whatever text, spares everybody a question.
    paid("sk-other-key.warm", topic="warm")
    first = paid("sk-other-key.before")
    assert first >= 2
    assert paid("sk-alice") == paid("sk-other-key.after") == first
    alone = paid("sk-other-key.alone", topic="oracle-alone")
    assert paid("sk-alice", "sk-other-key.beside", topic="oracle-again") == 2 * alone


def test_what_was_counted_for_another_tenant_is_counted_anew(office: Bench, liar: PlainServer) -> None:
    """Threat: the count of one's own request tells if somebody else has sent the same text, which a server counted."""
    body = body_of("honest", conversation("counted", 6))
    fresh = ask(office, "sk-bob", body).headers["x-litellm-compaction-tokens-before"]
    liar.says = lambda asked: (200, said("Fine.", usage={"prompt_tokens": int(fresh) + 60, "completion_tokens": 1}))
    ask(office, "sk-alice", body)
    # What is learned of all texts must not show the same: other ones are as they are counted.
    for topic in ("other", "third"):
        other = body_of("honest", conversation(topic, 6))
        exact = {"prompt_tokens": int(fresh), "completion_tokens": 1}
        liar.says = lambda asked, exact=exact: (200, said("Fine.", usage=exact))
        ask(office, "sk-bob", other)
    liar.says = honest
    answers = [ask(office, key, body) for key in ("sk-alice", "sk-key-only")]
    alice, another = (answer.headers["x-litellm-compaction-tokens-before"] for answer in answers)
    assert alice != another
