"""Every route that takes a conversation, to each way of writing a guarded deployment: none goes round the guard.

LiteLLM serves a route by a server's own one if it believes that the server has it, and then no chat leaves that a guard
could look at. The simulator records what comes on such a route, too, and counts what comes as a chat.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any, NamedTuple

import pytest
from litellm.exceptions import BadRequestError
from litellm.types.utils import CallTypes

from litellm_compaction.concurrency import Kept
from litellm_compaction.errors import LiteLLMChanged
from litellm_compaction.proxy.litellm_inside import LACKS, Seam, check_classes, missing
from litellm_compaction.proxy.routing import router_entries
from tests.builders import talk
from tests.integration.app import in_loop, socket
from tests.integration.bench import KEY, Bench, Group, open_bench
from tests.integration.forms import ROUTES, TALKS, form
from tests.integration.harness import CHAT, MASTER_KEY, until
from tests.lmstudio_double import Model, RequestRecord

_WINDOW = 4096
# A model that LiteLLM knows by its name alone, and one of a mode, which LiteLLM notes for all of its provider's.
_KNOWN, _OF_A_MODE = "gpt-4o", "glm-4-32b-0414"
SEEN = {CHAT, "/v1/completions"}
_ENDPOINTS = {"supported_endpoints": ["/v1/chat/completions", "/v1/messages", "/v1/responses"]}
_ENABLED = {"compaction": {"enabled": True, "context_length": _WINDOW}}


class _Way(NamedTuple):
    """How a deployment is written: `litellm_params` beside an address and a key, and `model_info`."""

    params: Mapping[str, Any]
    info: Mapping[str, Any] = {}


# By `model_name`. Those of "other" are no LM Studio, and opted in; all others are found out as LM Studio.
_WAYS = {
    "lm_studio": _Way({"model": f"lm_studio/{KEY}"}),
    "lm_studio as a provider": _Way({"model": KEY, "custom_llm_provider": "lm_studio"}),
    "lm_studio with its routes": _Way({"model": f"lm_studio/{KEY}"}, _ENDPOINTS),
    "lm_studio of a mode": _Way({"model": f"lm_studio/{_OF_A_MODE}"}, {"mode": "responses"}),
    "lm_studio by a route": _Way({"model": f"lm_studio/responses/{KEY}"}),
    "wild-lm_studio/*": _Way({"model": "lm_studio/*"}),
    "openai": _Way({"model": f"openai/{KEY}"}),
    "openai as a provider": _Way({"model": KEY, "custom_llm_provider": "openai"}),
    "openai by a name": _Way({"model": _KNOWN}),
    "openai by a credential": _Way({"model": f"openai/{KEY}", "litellm_credential_name": "local"}),
    "openai with its routes": _Way({"model": f"openai/{KEY}"}, _ENDPOINTS),
    "openai of a mode": _Way({"model": f"openai/{_OF_A_MODE}"}, {"mode": "responses"}),
    "openai by a route": _Way({"model": f"openai/responses/{KEY}"}),
    "openai by another route": _Way({"model": f"openai/chat_completions/{KEY}"}),
    "openai that is bridged": _Way({"model": f"openai/{KEY}", "use_chat_completions_api": True}),
    "openai enabled": _Way({"model": f"openai/{KEY}"}, _ENABLED),
    "custom_openai": _Way({"model": f"custom_openai/{KEY}"}),
    "wild-openai/*": _Way({"model": "openai/*"}),
    # Their providers have a responses or messages route of their own in LiteLLM, or ask another server for a text.
    **{
        f"other {provider}": _Way({"model": f"{provider}/{KEY}"}, _ENABLED)
        for provider in ("openai", "hosted_vllm", "llamafile", "deepseek", "text-completion-openai")
    },
}
# One of each kind in the default suite, the others before a release.
_KINDS = (
    *("lm_studio", "lm_studio by a route", "wild-lm_studio/*"),
    *("openai", "openai of a mode", "openai by a credential", "openai by another route"),
    *("other hosted_vllm", "other text-completion-openai"),
)
_CASES = [
    pytest.param(carrier, name, marks=[] if name in _KINDS else [pytest.mark.full])
    for carrier, names in {"auto": (*_WAYS, "alias"), "hooks": ("lm_studio", "openai", "other hosted_vllm")}.items()
    for name in names
]
# LiteLLM makes a list of one text of a chat for it, which this server does not take, and has no stream of a response.
_FOR_TEXTS = "other text-completion-openai"
# It asks no callback for the headers of generateContent, and has no checks of a pruning model's users and budgets.
_IS_OLDEST = version("litellm").startswith("1.100.")


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A proxy for each carrier, with each way to write a deployment."""
    groups = [
        Group("lms", _WINDOW),
        Group("local", _WINDOW, provider="openai", simulator={"api": "openai"}, **_ENABLED),
    ]
    credential: dict[str, Any] = {"credential_name": "local", "credential_info": {}, "credential_values": {}}

    def entries(urls: Mapping[str, str]) -> list[dict[str, Any]]:
        credential["credential_values"] |= {"api_base": f"{urls['lms']}/v1", "api_key": "k"}
        ways = {**_WAYS, "alone": _Way({"model": f"openai/{KEY}"}, {"compaction": {"enabled": False}})}
        return [_entry(name, way, urls["local" if name.startswith("other") else "lms"]) for name, way in ways.items()]

    with open_bench(
        tmp_path_factory.mktemp("ways"),
        groups,
        {"carrier": request.param, "notices": "off", "window_cache_s": 0.2},
        make_entries=entries,
        router_settings={"num_retries": 0, "disable_cooldowns": True, "model_group_alias": {"alias": "openai"}},
        credential_list=[credential],
    ) as running:
        simulator = running.simulators["lms"]
        simulator.models = [*simulator.models, *map(Model, (_KNOWN, _OF_A_MODE))]
        for key in (_KNOWN, _OF_A_MODE):
            simulator.load(key, _WINDOW)
        yield running


def _entry(name: str, way: _Way, url: str) -> dict[str, Any]:
    own = {} if "litellm_credential_name" in way.params else {"api_base": f"{url}/v1", "api_key": "k"}
    return {"model_name": name, "litellm_params": {**own, **way.params}, "model_info": dict(way.info)}


def outcome(bench: Bench, route: str, name: str, *, stream: bool) -> str:
    """ "guarded" or "refused" of a conversation that is too long, or else what went wrong."""
    messages = talk(f"{route} {name} {stream}", 6000)
    path, body = form(route, name.replace("*", KEY), messages, stream=stream, limit=300)
    watch = bench.watch("local" if name.startswith("other") else "lms")
    answer = bench.proxy.post(body, path)
    posts = [record for record in watch.records if record.method == "POST"]
    if elsewhere := sorted({record.path for record in posts} - SEEN):
        return f"round the guard: {', '.join(elsewhere)}"
    if problems := [problem for record in posts if (problem := over(record))]:
        return f"over the window: {', '.join(problems)}"
    if answer.status_code != 200:
        return f"refused: {answer.json()['error']['message']}"
    # A stream may part the word "Understood".
    if "stood" not in answer.text:
        return f"no answer: {answer.text[:300]}"
    return "guarded" if "x-litellm-compaction" in answer.headers else "guarded without a header"


def over(record: RequestRecord) -> str:
    bound = (record.body or {}).get("max_tokens")
    tokens = record.prompt_tokens + (bound if isinstance(bound, int) else 0)
    return f"{tokens} tokens on {record.path}" if record.truncated or tokens > _WINDOW else ""


@pytest.mark.parametrize("both", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(("bench", "name"), _CASES, indirect=["bench"], scope="module")
def test_no_route_leads_round_the_guard(bench: Bench, name: str, both: bool) -> None:
    """The server is asked for chats and texts that fit, and the client has our headers, or a refusal in our words.

    Each way meets each route whole or streamed, by turns, and both where there is time for it.
    """
    begin = list(_WAYS).index(name) if name in _WAYS else 0
    found = {
        (route, stream): outcome(bench, route, name, stream=stream)
        for number, route in enumerate(ROUTES, begin)
        for stream in (False, True)
        if both or stream is (number % 2 == 0)
    }
    for (route, _), said in found.items():
        if route == "completions":
            # A text is one message.
            assert said.startswith(f"refused: This model's maximum context length is {_WINDOW} tokens."), found
        elif name == _FOR_TEXTS:
            # It refuses inside of a stream, too.
            assert not said.startswith(("round the guard", "over the window")), found
        elif route == "generateContent" and _IS_OLDEST:
            assert said in ("guarded", "guarded without a header"), found
        else:
            assert said == "guarded", found


@pytest.mark.parametrize("bench", ["auto", "hooks"], indirect=True, scope="module")
def test_no_kind_of_call_but_a_chat_knows_where_a_guarded_server_is(bench: Bench) -> None:
    """Of all kinds that LiteLLM has, and of one that it does not name; a deployment that is left alone is left alone.

    What LiteLLM makes of another kind comes to the guard as a chat, which is given the address again.
    """
    bench.proxy.chat("lm_studio", [{"role": "user", "content": "Hi."}]).raise_for_status()
    router = importlib.import_module("litellm.proxy.proxy_server").llm_router
    handler = importlib.import_module("litellm_compaction").handler
    until(lambda: in_loop(handler.service.store.get_fact(*LACKS)) is not None)
    entries = {entry["model_name"]: entry for entry in router_entries(router)}

    def changed(name: str, kind: CallTypes | None) -> dict[str, Any] | str | None:
        entry = entries[name]
        asked = {"messages": talk("kinds", 6000), "input": "x", "metadata": {}}
        kwargs = {**entry["litellm_params"], "model_info": entry["model_info"], **asked}
        try:
            found: dict[str, Any] | None = in_loop(handler.async_pre_call_deployment_hook(kwargs, call_type=kind))
        except BadRequestError as error:
            return str(error)
        return found

    kinds = [kind for kind in (*CallTypes, None) if kind not in (CallTypes.acompletion, CallTypes.atext_completion)]
    assert {kind: changed("alone", kind) for kind in (*CallTypes, None)} == dict.fromkeys((*CallTypes, None))
    found = {str(kind and kind.value): changed("lm_studio", kind) for kind in kinds}
    sent = {kind: each for kind, each in found.items() if isinstance(each, dict)}
    routes = {"anthropic_messages", "aresponses", "_aresponses_websocket", "agenerate_content"}
    assert sent.keys() == {*routes, "agenerate_content_stream", "None"}
    assert {each["api_base"] for each in sent.values()} == {"http://guarded.invalid/v1"}
    assert not any("api_key" in each for each in sent.values())
    refused = {kind: each for kind, each in found.items() if isinstance(each, str)}
    assert {"_arealtime", "allm_passthrough_route"} <= refused.keys()
    assert all("This route is not served for this model" in said for said in refused.values())
    # Calls without a conversation have nothing to guard.
    assert {found[kind] for kind in ("aembedding", "arerank", "amoderation", "aspeech", "atranscription")} == {None}


@pytest.mark.parametrize("bench", ["auto", "hooks"], indirect=True, scope="module")
def test_an_answer_teaches_what_its_prompt_counts(bench: Bench) -> None:
    """By its usage: the same prompt is told with the server's own number the next time."""
    watch = bench.watch("local")
    body = {"model": "other hosted_vllm", "messages": talk("taught", 700), "max_tokens": 20}
    told = [bench.proxy.post(body).headers["x-litellm-compaction-tokens-before"] for _ in range(2)]
    assert told[0] != told[1] == str(watch.chats[-1].prompt_tokens)


class _Lacking:
    """LiteLLM's router without a member, and without the entry point that takes its place."""

    def __init__(self, router: Any) -> None:
        self._router = router

    def __getattr__(self, name: str) -> Any:
        if name in ("get_deployment", "registry"):
            raise AttributeError(name)
        return getattr(self._router, name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("lacks", ["get_deployment", "client="])
@pytest.mark.parametrize("bench", ["auto"], indirect=True, scope="module")
def test_a_guard_that_cannot_stand_sends_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    """On any route a 503 that says what is missing, and none for a deployment that is left alone."""
    alone = {"model": "alone", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 20}
    bench.proxy.post(alone)  # from now on it is its own application that is open
    service = importlib.import_module("litellm_compaction").handler.service
    guards = service.guards
    monkeypatch.setattr(guards, "faults", Kept(guards.faults._obtain, lambda _: math.inf, most=2))
    router = importlib.import_module("litellm.proxy.proxy_server").llm_router
    if lacks == "client=":
        # LiteLLM's own handler ignores the client that it is given.
        monkeypatch.setenv("EXPERIMENTAL_OPENAI_BASE_LLM_HTTP_HANDLER", "true")
    else:
        router = _Lacking(router)
        monkeypatch.setattr("litellm_compaction.proxy.callback.current_router", lambda: router)
    watch = bench.watch("lms")
    for route in ROUTES:
        for stream in (False, True):
            # A text that is too long is refused before it is routed.
            messages = talk(f"lacking {route}", 6000 if route in TALKS else 1000)
            path, body = form(route, "lm_studio", messages, stream=stream, limit=300)
            said = bench.proxy.post(body, path)
            assert (said.status_code, lacks in said.text) == (503, True), said.text
    assert watch.chats == []
    assert bench.proxy.post(alone).status_code == 200
    in_loop(service.look_at_seams(router))
    assert lacks in in_loop(service.store.get_fact(*LACKS))


@pytest.mark.parametrize("seam", list(Seam), ids=lambda seam: seam.name.lower())
@pytest.mark.parametrize("bench", ["auto"], indirect=True, scope="module")
def test_what_litellm_lacks_is_said_and_nothing_is_cut(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, seam: Seam
) -> None:
    """Each piece of its inside that we touch, taken away: a sentence names it, and no prompt is over the window."""
    lacks = missing()
    assert lacks == [] or _IS_OLDEST
    # LiteLLM itself goes on with it.
    monkeypatch.setattr(seam, "places", (f"gone.{seam.places[0]}",))
    if seam.lost:
        assert {*missing()} == {*lacks, f"{seam} of LiteLLM's is missing or has changed: {seam.lost}."}
    else:
        with pytest.raises(LiteLLMChanged, match=rf"{seam} is missing"):
            check_classes([])
    path, body = form("chat", "openai by a credential", talk(f"without {seam}", 6000), stream=True, limit=300)
    said = bench.proxy.post(body, path)
    # Some are looked at only before the start.
    if seam in (Seam.ROUTER, Seam.CREDENTIALS):
        assert (said.status_code, str(seam) in said.text) == (503, True), said.text
    else:
        assert (said.status_code, said.headers.get("x-litellm-compaction")) == (200, "compacted")
    assert bench.findings() == []


@pytest.mark.parametrize("name", ["lm_studio with its routes", "openai", "other openai"])
@pytest.mark.parametrize("bench", ["auto"], indirect=True, scope="module")
def test_no_websocket_leads_round_the_guard(bench: Bench, name: str) -> None:
    """LiteLLM would open one to the server, for as many responses as the client asks for."""
    watch = bench.watch("local" if name.startswith("other") else "lms")
    asked = {"type": "response.create", "model": name, "input": talk(f"socket {name}", 6000)}
    with socket(bench.proxy, "/v1/responses", MASTER_KEY) as ask:
        assert ask(asked)["type"] == "response.completed"
        # As LiteLLM has it, a later one may name any model, for the same server.
        assert ask({**asked, "model": f"openai/{KEY}"})["type"] == "error"
    assert {record.path for record in watch.records if record.method == "POST"} <= SEEN
    assert [each.namespace for each in watch.simulator.sdk.sockets if "responses" in each.namespace] == []
    assert [problem for record in watch.records if (problem := over(record))] == []
