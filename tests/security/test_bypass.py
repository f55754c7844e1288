"""Threat: a request that gets round what guards it, or uses us to get round what LiteLLM guards (issue 12)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from litellm import Router as LiteLLMRouter
from litellm.caching.caching import DualCache
from litellm.exceptions import BadRequestError
from litellm.proxy._types import UserAPIKeyAuth
from litellm.proxy.hooks.parallel_request_limiter_v3 import _PROXY_MaxParallelRequestsHandler_v3
from litellm.proxy.utils import InternalUsageCache
from litellm.types.utils import CallTypes

from litellm_compaction.core.messages import user_message
from litellm_compaction.errors import SummaryFailed
from litellm_compaction.proxy import internal, litellm_api
from litellm_compaction.proxy.internal import Caller
from tests.builders import talk
from tests.integration.bench import Bench
from tests.integration.harness import CHAT
from tests.security.hooks import WINDOW, Client, Router, Scene, conversation, use_router

# LiteLLM's own, some of them while its proxy is imported.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

# Longer than any window here: 40 rounds are about 9,000 tokens.
_LONG = conversation("long", 40)
_BIG_TOOL = {"type": "function", "function": {"name": "f", "description": "word " * 9000, "parameters": {}}}
_PROVIDERS = (
    "hosted_vllm",
    "together_ai",
    "litellm_proxy",
    "llamafile",
    "xinference",
    "deepseek",
    "fireworks_ai",
    "openrouter",
    "openai",
    "anthropic",
    "ollama_chat",
)
_OFF = {"compaction": "off"}


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def _as_json(body: Mapping[str, Any]) -> bytes:
    """A body as JSON, which Python's own encoder refuses to write where "odd" is nested too deep."""
    plain = {key: value for key, value in body.items() if key != "odd"}
    depth, value = 0, body.get("odd")
    while value:
        depth, value = depth + 1, value[0]
    odd = "" if value is None else ', "odd": ' + "[" * (depth + 1) + "]" * (depth + 1)
    return f"{json.dumps(plain)[:-1]}{odd}}}".encode()


# Fields of a body that a client may send beside a conversation that is too long.
_SPOOFS: dict[str, dict[str, Any]] = {
    **{f"custom_llm_provider {name}": {"custom_llm_provider": name} for name in _PROVIDERS},
    "provider in extra_body": {"extra_body": {"custom_llm_provider": "hosted_vllm"}},
    "model in extra_body": {"extra_body": {"model": "other"}},
    "max_tokens in extra_body": {"extra_body": {"max_tokens": 10**9, "max_completion_tokens": 10**9}},
    "compaction": _OFF,
    "metadata": {"metadata": _OFF},
    "litellm_metadata": {"litellm_metadata": _OFF},
    "metadata as text": {"metadata": '{"compaction": "off"}'},
    "metadata with a key of LiteLLM's": {"metadata": {"user_api_key": "sk-admin", **_OFF}},
    "mode": {"mode": "off"},
    "model_info": {"model_info": {"id": "none", "compaction": {"enabled": False, "mode": "off"}}},
    "litellm_params": {"litellm_params": {"model": "openai/x", "model_info": {}}},
    "callback_settings": {"callback_settings": {"litellm_compaction": {"mode": "off"}}},
    "logging object": {"litellm_logging_obj": {"model_call_details": {}}},
    "call id": {"litellm_call_id": "t1"},
    "internal call": {"internal_call_origin": "autorouter_compaction", "is_internal": True},
    "origin": {"metadata": {"internal_call_origin": "autorouter_compaction"}},
    "client": {"client": None},
    "role that is no string": {"messages": [{"role": 7, "content": "x"}, *_LONG]},
    "first role missing": {"messages": [{"content": "x"}, *_LONG]},
    "proxy_server_request": {"proxy_server_request": {"body": {}}},
    "headers": {"extra_headers": {"x-litellm-compaction": "off"}},
    "guardrails": {"disable_global_guardrails": True, "guardrails": []},
    "n_predict": {"n_predict": 10**9, "max_tokens": 50},
    "n_predict without end": {"n_predict": -1},
    "n_predict in extra_body": {"extra_body": {"n_predict": 10**9}},
    "chat_template": {"chat_template": "{{ messages }}" * 9},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False, "documents": [{"text": "x"}]}},
    "prompt": {"prompt": "word " * 9},
    **{f"a field {depth} deep": {"odd": _nested(depth)} for depth in (200, 900, 941, 950, 959, 990, 5000)},
}
# Conversations that come in another way than the one that is looked at.
_SMUGGLED: dict[str, dict[str, Any]] = {
    "messages": {"messages": _LONG},
    "messages and max_tokens": {"messages": _LONG, "max_tokens": 10**9},
    "tools": {"tools": [_BIG_TOOL]},
    "functions": {"functions": [_BIG_TOOL["function"]]},
}
_HI = [{"role": "user", "content": "hi"}]
_MANY = "word " * 9000
# What servers write into the prompt besides messages and tools, each longer than the window.
_RENDERED: dict[str, dict[str, Any]] = {
    "documents": {"documents": [{"title": "a", "text": _MANY}]},
    "documents that are text": {"documents": _MANY},
    "an argument of the template": {"chat_template_kwargs": {"note": _MANY}},
    "an argument's names": {"chat_template_kwargs": {f"name of argument {number}": 1 for number in range(9000)}},
    "an argument's numbers": {"chat_template_kwargs": {"ids": list(range(9000))}},
    "an argument's depth": {"chat_template_kwargs": {"deep": _nested(9000)}},
    "messages as an argument": {"chat_template_kwargs": {"messages": _LONG}},
    "tools as an argument": {"chat_template_kwargs": {"tools": [_BIG_TOOL]}},
    "effort": {"reasoning_effort": _MANY},
    "tools as an object": {"tools": {"f": _BIG_TOOL}},
    "tools as text": {"tools": _MANY},
    "functions beside tools": {"tools": [{"type": "function", "function": {"name": "g"}}], "functions": [_BIG_TOOL]},
    "functions as an object": {"functions": {"f": _BIG_TOOL}},
    "suffix": {"suffix": _MANY},
}
# Templates of a client's own, which may write anything any number of times.
_TEMPLATES: dict[str, dict[str, Any]] = {
    "template": {"chat_template": "{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}"},
    "template as an argument": {"chat_template_kwargs": {"chat_template": "{{ messages }}" * 99}},
    "template that is no text": {"chat_template": ["x"]},
}
# What shapes how an answer is chosen, and is in no prompt: however long, it takes no room in the window.
_NOT_RENDERED: dict[str, dict[str, Any]] = {
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"description": _MANY}}}
    },
    "grammar": {"grammar": _MANY},
    "prediction": {"prediction": {"type": "content", "content": _MANY}},
    "biases": {"logit_bias": {str(number): 1 for number in range(9000)}},
    "echo": {"echo": True},
    "few arguments": {"chat_template_kwargs": {"enable_thinking": False}},
    "effort": {"reasoning_effort": "high"},
}


@pytest.mark.parametrize("group", ["carried", "hooked"])
@pytest.mark.parametrize("smuggled", _SMUGGLED)
async def test_extra_body_is_guarded_like_the_body(monkeypatch: pytest.MonkeyPatch, group: str, smuggled: str) -> None:
    """The OpenAI client puts it over the body: what leaves fits, or nothing leaves."""
    scene = Scene()
    use_router(monkeypatch, scene.router)
    client = Client(scene, "sk-bob", _HI, attempts=[group], body={"extra_body": _SMUGGLED[smuggled]})
    await client.send()
    left = [*client.sent, *scene.server.bodies]
    assert all(len(json.dumps(body)) < 6 * WINDOW for body in left)
    assert all(body.get("max_tokens", 0) < WINDOW for body in left)
    assert left or client.error is not None or "maximum context length" in client.read


@pytest.mark.parametrize("place", ["body", "extra_body"])
@pytest.mark.parametrize("group", ["carried", "hooked"])
@pytest.mark.parametrize("field", _RENDERED)
async def test_what_a_server_renders_takes_room(
    monkeypatch: pytest.MonkeyPatch, field: str, group: str, place: str
) -> None:
    """Longer than the window nothing leaves, and the client is told how many tokens there are; by each carrier."""
    scene, given = Scene(), _RENDERED[field]
    use_router(monkeypatch, scene.router)
    client = Client(scene, "sk-bob", _HI, attempts=[group], body=given if place == "body" else {"extra_body": given})
    await client.send()
    assert [*client.sent, *scene.server.bodies] == []
    told = client.read or str(client.error)
    assert "maximum context length is 1200 tokens" in told or "nested too deep" in told
    assert "nested too deep" not in told or "depth" in field


@pytest.mark.parametrize("group", ["carried", "hooked"])
@pytest.mark.parametrize("template", _TEMPLATES)
async def test_a_clients_own_template_is_refused(monkeypatch: pytest.MonkeyPatch, template: str, group: str) -> None:
    """It may write the prompt any number of times: nobody can say how long that is, so nothing is sent."""
    for given in (_TEMPLATES[template], {"extra_body": _TEMPLATES[template]}):
        scene = Scene()
        use_router(monkeypatch, scene.router)
        client = Client(scene, "sk-bob", _HI, attempts=[group], body=given)
        await client.send()
        assert [*client.sent, *scene.server.bodies] == []
        assert "chat_template" in (client.read or str(client.error))


@pytest.mark.parametrize("group", ["carried", "hooked"])
@pytest.mark.parametrize("field", _NOT_RENDERED)
async def test_what_no_server_renders_leaves_as_it_came(
    monkeypatch: pytest.MonkeyPatch, field: str, group: str
) -> None:
    """No room is taken for it, and the tests above see the server's side of the same fields."""
    scene, given = Scene(), _NOT_RENDERED[field]
    use_router(monkeypatch, scene.router)
    plain, client = (Client(scene, "sk-bob", _HI, attempts=[group], body=body) for body in ({}, given))
    for each in (plain, client):
        each.sent = scene.server.bodies if group == "carried" else each.sent
        await each.send()
    (name,) = given
    assert client.error is None
    assert client.sent[-1][name] == given[name]
    assert client.sent[-1]["max_tokens"] == (plain.sent[0])["max_tokens"]
    assert scene.router.asked == []


@pytest.mark.parametrize("group", ["carried", "hooked"])
async def test_what_a_server_renders_leaves_room_for_the_answer(monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    """A few documents go along; the answer has what they leave of the window."""
    scene = Scene()
    use_router(monkeypatch, scene.router)
    given = {"documents": [{"text": "word " * 200}]}
    client = Client(scene, "sk-bob", conversation("bob", 0), attempts=[group], body=given)
    await client.send()
    assert client.error is None
    (left,) = client.sent
    assert left["documents"] == given["documents"]
    assert 256 <= left["max_tokens"] <= WINDOW - 200


@pytest.mark.parametrize("group", ["carried", "hooked"])
@pytest.mark.parametrize("spoof", _SPOOFS)
async def test_no_field_of_the_body_switches_the_guard_off(
    monkeypatch: pytest.MonkeyPatch, group: str, spoof: str
) -> None:
    """By each carrier: compacted or refused, never let through; by the deployment's own provider."""
    scene = Scene()
    use_router(monkeypatch, scene.router)
    client = Client(scene, "sk-bob", _LONG, attempts=[group], body=_SPOOFS[spoof])
    await client.send()
    left = [*client.sent, *scene.server.bodies]
    # What is nested deeper than JSON may be written ends in an error; what leaves without it is as short.
    # A template of the client's own is refused.
    assert left or "deep" in spoof or spoof == "chat_template"
    left = [{key: value for key, value in body.items() if key != "odd"} for body in left]
    assert all(len(json.dumps(body)) < 6 * WINDOW for body in left)
    assert all(0 <= body.get(key, 0) < WINDOW for body in left for key in ("max_tokens", "n_predict"))
    assert set(client.providers) <= {None, "openai" if group == "carried" else "deepseek"}


_GIANT = "word " * 9000
# What stands at the beginning of a conversation, before enough of it to be compacted.
_SHAPES: dict[str, list[Any]] = {
    **{
        f"a part nested {depth} deep": [
            {"role": "user", "content": [{"type": "text", "text": "x", "odd": _nested(depth)}]}
        ]
        for depth in (200, 800)
    },
    "no role": [{"content": "hi"}],
    **{f"role {role!r}": [{"role": role, "content": _GIANT}] for role in (7, None, ["user"], "", "user ", "developer")},
    **{
        f"content {type(content).__name__}": [{"role": "user", "content": content}]
        for content in (7, True, {"text": _GIANT}, [1, 2], [[_GIANT]], [_GIANT], None)
    },
    "a part of no type": [{"role": "user", "content": [{"text": _GIANT}]}],
    "a part of an unknown type": [{"role": "user", "content": [{"type": "odd", "text": _GIANT}]}],
    "a part whose text is an object": [{"role": "user", "content": [{"type": "text", "text": {"text": _GIANT}}]}],
    "a giant name": [{"role": "user", "name": "n" * 45_000, "content": "hi"}],
    "a giant refusal": [{"role": "assistant", "content": None, "refusal": _GIANT}],
    "giant thoughts": [{"role": "assistant", "content": "hi", "reasoning_content": _GIANT}],
    "giant thoughts, by another name": [{"role": "assistant", "content": "hi", "reasoning": _GIANT}],
    "giant blocks of thoughts": [
        {"role": "assistant", "content": "hi", "thinking_blocks": [{"type": "thinking", "thinking": _GIANT}]}
    ],
    "calls that are no list": [{"role": "assistant", "content": "hi", "tool_calls": {"function": _GIANT}}],
    "arguments that are an object": [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": _GIANT}}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ],
    "an older call": [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": json.dumps({"x": _GIANT})}},
        {"role": "function", "name": "f", "content": _GIANT},
    ],
    "a result without a call": [{"role": "tool", "tool_call_id": "c", "content": _GIANT}],
    "a message that is text": [_GIANT],
    "a message that is a list": [["user", _GIANT]],
}


@pytest.mark.parametrize("group", ["carried", "hooked"])
@pytest.mark.parametrize("shape", _SHAPES)
async def test_no_shape_of_a_message_switches_the_guard_off(
    monkeypatch: pytest.MonkeyPatch, group: str, shape: str
) -> None:
    """What no server expects is compacted or refused like the rest: what leaves is short, or nothing does."""
    scene = Scene()
    use_router(monkeypatch, scene.router)
    client = Client(scene, "sk-bob", [*_SHAPES[shape], *_LONG[1:]], attempts=[group])
    await client.send()
    left = [*client.sent, *scene.server.bodies]
    assert all(len(json.dumps(body)) < 6 * WINDOW for body in left)
    assert left or client.error is not None or "error" in client.read


@pytest.mark.parametrize("group", ["carried", "hooked"])
async def test_no_kind_of_call_but_a_chat_knows_where_a_guarded_server_is(
    monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    """Of all kinds that LiteLLM has, and of one that it does not name; calls without a conversation are left alone."""
    scene = Scene()
    use_router(monkeypatch, scene.router)
    entry, alone = scene.router.entries[group], scene.router.entries["foreign"]
    asked = {"messages": _LONG, "input": "x", "metadata": {}, "supported_endpoints": ["/v1/messages"]}
    changed: set[str] = set()
    refused: dict[str, str] = {}
    for kind in [*CallTypes, None]:
        hook = partial(scene.handler.async_pre_call_deployment_hook, call_type=kind)
        assert await hook({**alone["litellm_params"], "model_info": alone["model_info"], **asked}) is None
        if kind in (CallTypes.acompletion, CallTypes.atext_completion):
            continue
        kwargs = {**entry["litellm_params"], "model_info": entry["model_info"], **asked}
        try:
            found = await hook(dict(kwargs))
        except BadRequestError as error:
            refused[str(kind and kind.value)] = str(error)
            continue
        if found is None:
            continue
        changed.add(str(kind and kind.value))
        assert found["api_base"] == "http://guarded.invalid/v1"
        assert "api_key" not in found
        # What LiteLLM makes of it reaches the server again, if it is a chat, and also if the guard fails.
        with monkeypatch.context() as broken:
            broken.setattr(scene.handler._gate, "before_deployment", _fails)
            assert await scene.handler.async_pre_call_deployment_hook(dict(found), CallTypes.acompletion) == kwargs
    routes = {"anthropic_messages", "aresponses", "_aresponses_websocket", "agenerate_content"}
    assert changed == {*routes, "agenerate_content_stream", "None"}
    assert {"_arealtime", "allm_passthrough_route"} <= refused.keys()
    assert all("This route is not served for this model" in said for said in refused.values())
    assert refused.keys().isdisjoint(("aembedding", "arerank", "amoderation", "aspeech", "atranscription"))


async def _fails(*_: Any) -> None:
    raise RuntimeError


@pytest.mark.proxy
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
def test_no_field_of_the_body_switches_the_guard_of_a_proxy_off(office: Bench, path: str) -> None:
    """All of the table, one after the other, through a real proxy: what reaches the server fits its window."""
    watch = office.watch("small")
    texts = [message for message in talk("spoofs", 6000) if message["role"] != "system"]
    long = {"input": texts} if path == "/v1/responses" else {"messages": texts, "max_tokens": 300}
    headers = {"Authorization": "Bearer sk-bob", "Content-Type": "application/json"}
    smuggled = {name: {"extra_body": fields} for name, fields in _SMUGGLED.items()} if path == CHAT else {}
    for name, fields in {**_SPOOFS, **smuggled}.items():
        own = {key: value for key, value in fields.items() if key != "messages"}
        body = {"model": "small", **long, **own} if name not in smuggled else {"model": "small", "messages": _HI, **own}
        office.proxy.client.post(path, content=_as_json(body), headers=headers)
        assert office.findings() == [], name
    assert len(watch.chats) > 10


_ONLY = ["chat-8k"]
# Whether somebody may have summaries written by the model `pruner-large`.
_CALLERS: dict[str, tuple[dict[str, Any], bool]] = {
    "no lists": ({}, True),
    "its own list": ({"models": _ONLY}, False),
    "its own list with it": ({"models": [*_ONLY, "pruner-large"]}, True),
    "no default models": ({"models": ["no-default-models"]}, False),
    "the team's list": ({"team_id": "t", "team_models": _ONLY}, False),
    "all of the team's, which has not": ({"models": ["all-team-models"], "team_id": "t", "team_models": _ONLY}, False),
    "all of the team's, which has": (
        {"models": ["all-team-models"], "team_id": "t", "team_models": ["pruner-large"]},
        True,
    ),
    "its own list with it, not the team's": (
        {"models": ["pruner-large"], "team_id": "t", "team_models": _ONLY},
        False,
    ),
    "a budget for it that is spent": (
        {"token": "hash", "model_max_budget": {"pruner-large": {"budget_limit": 0.0, "time_period": "1d"}}},
        False,
    ),
    "a budget for another model": (
        {"token": "hash", "model_max_budget": {"chat-8k": {"budget_limit": 0.0, "time_period": "1d"}}},
        True,
    ),
}


@pytest.mark.parametrize("caller", _CALLERS)
async def test_pruning_model_obeys_litellms_own_checks(monkeypatch: pytest.MonkeyPatch, caller: str) -> None:
    """Where LiteLLM would refuse the same call, the pruning model is not asked, and a summary is made without it."""
    importlib.import_module("litellm.proxy.proxy_server")
    names = ("chat-8k", "pruner-large")
    entries = [{"model_name": name, "litellm_params": {"model": f"openai/{name}", "api_key": "k"}} for name in names]
    fields, allowed = _CALLERS[caller]
    metadata = {"user_api_key_auth": UserAPIKeyAuth(api_key="sk-1", **fields)}
    router, asked = LiteLLMRouter(model_list=entries), Router()
    router.acompletion = asked.acompletion
    assert await litellm_api.is_allowed(router, "pruner-large", metadata) is allowed
    ask = Caller(router, "pruner-large", metadata, timeout_s=5, group="pruner-large").ask
    monkeypatch.setattr(litellm_api, "_limiter", lambda: None)
    if allowed:
        await ask([user_message("text")], max_tokens=5)
    else:
        with pytest.raises(SummaryFailed, match="not_allowed"):
            await ask([user_message("text")], max_tokens=5)
    assert len(asked.asked) == allowed


@pytest.mark.parametrize("caller", [caller for caller in _CALLERS if "budget" not in caller])
def test_lists_of_key_and_team_hold_by_themselves(caller: str) -> None:
    """Where LiteLLM has no checks of its own, and on the page, the lists that a key carries decide alone."""
    names = ("chat-8k", "pruner-large")
    entries = [{"model_name": name, "litellm_params": {"model": f"openai/{name}", "api_key": "k"}} for name in names]
    fields, allowed = _CALLERS[caller]
    metadata = {"user_api_key_auth": UserAPIKeyAuth(api_key="sk-1", **fields)}
    assert litellm_api.may_use(LiteLLMRouter(model_list=entries), "pruner-large", metadata) is allowed


@pytest.mark.parametrize(("listed", "allowed"), [(_ONLY, False), ([*_ONLY, "pruner-large"], True)], ids=["no", "yes"])
@pytest.mark.parametrize(("field", "lookup"), [("user_id", "get_user_object"), ("project_id", "get_project_object")])
async def test_lists_in_litellms_database_hold(
    monkeypatch: pytest.MonkeyPatch, field: str, lookup: str, listed: list[str], allowed: bool
) -> None:
    """A user's and a project's lists of models stand in the database only: LiteLLM's own checks read them there."""
    proxy_server = importlib.import_module("litellm.proxy.proxy_server")
    auth_checks = importlib.import_module("litellm.proxy.auth.auth_checks")
    looked_up: list[object] = []

    async def stored(**asked: Any) -> Any:
        looked_up.append(asked.get(field))
        return SimpleNamespace(models=listed, user_id="u", project_id="u", project_alias="", user_role=None)

    monkeypatch.setattr(proxy_server, "prisma_client", object())
    monkeypatch.setattr(auth_checks, lookup, stored)
    names = ("chat-8k", "pruner-large")
    entries = [{"model_name": name, "litellm_params": {"model": f"openai/{name}", "api_key": "k"}} for name in names]
    metadata = {"user_api_key_auth": UserAPIKeyAuth(**{"api_key": "sk-1", field: "u"})}
    assert await litellm_api.is_allowed(LiteLLMRouter(model_list=entries), "pruner-large", metadata) is allowed
    assert looked_up == ["u"]


@pytest.mark.parametrize("check", ["is_allowed", "takes_place"])
async def test_checks_that_fail_let_nothing_through(monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    """As LiteLLM's own: without an answer the pruning model is not asked."""

    async def broken(*_: object) -> bool:
        raise RuntimeError("no database")

    monkeypatch.setattr(internal, check, broken)
    router = Router()
    ask = Caller(router, "carried", {}, timeout_s=5, group="carried").ask
    with pytest.raises(SummaryFailed, match="not_checked"):
        await ask([user_message("text")], max_tokens=5)
    assert router.asked == []


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize(
    ("limits", "calls"),
    [({"rpm_limit": 2}, 2), ({"user_id": "u", "user_rpm_limit": 3}, 3), ({"max_parallel_requests": 1}, 4), ({}, 4)],
    ids=["key", "user", "slots", "none"],
)
async def test_summary_calls_count_as_requests_of_the_key(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any], calls: int, is_same: bool
) -> None:
    """A key for two requests a minute had four made; its own slot of parallel calls does not stand in its way."""
    limiter = _PROXY_MaxParallelRequestsHandler_v3(internal_usage_cache=InternalUsageCache(DualCache()))
    monkeypatch.setattr(litellm_api, "_limiter", lambda: limiter)
    monkeypatch.setattr(litellm_api, "_LITELLM_CHECKS", ())
    metadata = {"user_api_key_auth": UserAPIKeyAuth(api_key="sk-1", **limits)}
    router = Router()
    ask = Caller(router, "carried", metadata, timeout_s=5, group="carried", is_same=is_same).ask
    for _ in range(calls):
        await ask([user_message("text")], max_tokens=5)
    for _ in range(4 - calls):
        with pytest.raises(SummaryFailed, match="rate_limit"):
            await ask([user_message("text")], max_tokens=5)
    assert len(router.asked) == calls
    counted = limiter.internal_usage_cache.dual_cache.in_memory_cache.cache_dict
    used = [count for name, count in counted.items() if str(name).endswith(":requests")]
    # What is refused is not counted: the client's own next request has what the summary did not get.
    assert all(int(count) == calls for count in used)
    assert used or not {"rpm_limit", "user_rpm_limit"} & limits.keys()


@pytest.mark.parametrize(
    ("caller", "allowed"),
    [
        ({}, True),
        ({"max_budget": 5.0, "spend": 4.0}, True),
        ({"max_budget": 5.0, "spend": 5.0}, False),
        ({"team_id": "t", "team_max_budget": 1.0, "team_spend": 2.0}, False),
        ({"user_id": "u", "user_max_budget": 1.0, "user_spend": 2.0}, False),
        # What is spent of these does not stand in LiteLLM's object of the caller.
        ({"organization_max_budget": 100.0}, False),
        ({"end_user_max_budget": 100.0}, False),
        ({"models": _ONLY}, False),
    ],
)
async def test_nothing_is_written_ahead_for_a_key_that_litellm_would_refuse(
    monkeypatch: pytest.MonkeyPatch, caller: dict[str, Any], allowed: bool
) -> None:
    """No request of a client is there that LiteLLM has checked: lists and budgets are looked at for the call itself."""
    importlib.import_module("litellm.proxy.proxy_server")
    monkeypatch.setattr(litellm_api, "_limiter", lambda: None)
    names = ("chat-8k", "pruner-large")
    entries = [{"model_name": name, "litellm_params": {"model": f"openai/{name}", "api_key": "k"}} for name in names]
    metadata = {"user_api_key_auth": UserAPIKeyAuth(api_key="sk-1", **caller)}
    assert await internal.may_write_ahead(LiteLLMRouter(model_list=entries), ["pruner-large"], metadata) is allowed


async def test_what_is_written_ahead_leaves_half_of_a_keys_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key for six requests a minute asks three, and no call in the background takes one from its own fourth."""
    limiter = _PROXY_MaxParallelRequestsHandler_v3(internal_usage_cache=InternalUsageCache(DualCache()))
    monkeypatch.setattr(litellm_api, "_limiter", lambda: limiter)
    monkeypatch.setattr(litellm_api, "_LITELLM_CHECKS", ())
    metadata = {"user_api_key_auth": UserAPIKeyAuth(api_key="sk-1", rpm_limit=6)}
    may = partial(internal.may_write_ahead, Router(), ["carried"], metadata)
    ask = Caller(Router(), "carried", metadata, timeout_s=5, group="carried", is_same=True).ask
    allowed = []
    for _ in range(5):
        allowed.append(await may())
        await ask([user_message("text")], max_tokens=5)
    assert allowed == [True, True, True, True, False]
