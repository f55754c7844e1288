"""Which deployments are guarded, who is asked for a window, what is shown of it, and who carries an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from litellm_compaction.config import Settings
from litellm_compaction.proxy.live_settings import LiveSettings
from litellm_compaction.proxy.routing import Deployment, DeploymentSelector, deployment_of, limits_of, reachable_entries
from litellm_compaction.proxy.wire import refusing
from litellm_compaction.windows.windows import Target, Window, Windows
from tests.constants import settings_of

ON = {"compaction": {"enabled": True}}
LOCAL, HOSTED = "http://127.0.0.1:8080/v1", "https://api.example.com/v1"


def deployment(model: str, info: dict[str, Any] | None = None, **params: Any) -> Deployment:
    return deployment_of({"model": model, **params}, info or {}, group="g", environ={})


def kind(read: Deployment) -> str:
    return "foreign" if read.is_foreign else "asked" if read.is_asked_first else "guarded"


def opted(model: str, info: dict[str, Any] | None = None, **params: Any) -> Target:
    """The target of an opted-in deployment whose server is not LM Studio."""
    own = info or {}
    read = deployment(model, {**own, "compaction": {"enabled": True, **own.get("compaction", {})}}, **params)
    return read.opted_in or read.target


@pytest.mark.parametrize(
    ("info", "window"),
    [
        ({"compaction": {"context_length": 9000}, "max_input_tokens": 7000}, (9000, "operator")),
        ({"max_input_tokens": 7000}, (7000, "max_input_tokens")),
        *(({"max_input_tokens": most}, (most, "max_input_tokens")) for most in (1, 7000.0, 10**9)),
        *(({"max_input_tokens": odd}, (None, "operator")) for odd in (True, 0, 10**9 + 1, "7000", None)),
    ],
)
def test_the_sources_of_a_window_have_an_order(info: dict[str, Any], window: tuple[int | None, str]) -> None:
    """context_length, the operator's max_input_tokens; otherwise there is none, whatever a request says."""
    target = opted("openrouter/never-heard-of", info=info, max_input_tokens=5000, num_ctx=5000)
    assert (target.context_length, target.context_source) == window
    # Opting LM Studio in changes nothing: its window is read, or unknown.
    own = deployment("lm_studio/x", {**info, **ON}, api_base=LOCAL)
    assert (own.is_asked_first, own.target.context_length, own.opted_in) == (False, None, None)


@pytest.mark.parametrize(
    ("model", "api_base", "tokens"),
    [
        ("openai/x", LOCAL, None),
        ("openai/x", "http://gpu.lan:8000/v1", None),
        ("hosted_vllm/x", "https://vllm.example.com/v1", None),
        ("ollama/x", None, None),
        ("openai/x", None, 128_000),
        ("ollama_chat/x", "https://ollama.com", None),
    ],
)
def test_a_hosted_pruning_model_has_a_supposed_window(model: str, api_base: str | None, tokens: int | None) -> None:
    """A server of one's own has any context length, and may cut silently; nothing is supposed of a guarded model."""
    asked = deployment_of({"model": model, "api_base": api_base}, {}, group="g", environ={}, is_asked=True)
    assert (asked.opted_in or asked.target).context_length == tokens
    assert opted(model, api_base=api_base).context_length is None


@pytest.mark.parametrize(
    ("params", "environ", "expected"),
    [
        ({"model": "openai/responses/x"}, {}, ("openai", "x", LOCAL, "asked")),
        ({"model": "lm_studio/responses/x"}, {}, ("lm_studio", "x", LOCAL, "guarded")),
        ({"model": "responses/x", "custom_llm_provider": "openai"}, {}, ("openai", "x", LOCAL, "asked")),
        ({"model": "gpt-4o"}, {}, ("openai", "gpt-4o", LOCAL, "asked")),
        ({"model": "claude-sonnet-4-5"}, {}, ("", "claude-sonnet-4-5", LOCAL, "foreign")),
        ({"model": "openai/x", "api_base": None}, {"OPENAI_BASE_URL": LOCAL}, ("openai", "x", LOCAL, "asked")),
        ({"model": "openai/x", "api_base": None}, {"OPENAI_BASE_URL": HOSTED}, ("openai", "x", None, "foreign")),
        ({"model": "openai/x", "api_base": HOSTED}, {"OPENAI_BASE_URL": LOCAL}, ("openai", "x", HOSTED, "foreign")),
        # A client may ask a wildcard deployment for no model, and LM Studio answers with what is loaded.
        ({"model": "lm_studio/"}, {}, ("lm_studio", "", LOCAL, "guarded")),
        ({"model": "lm_studio//"}, {}, ("lm_studio", "/", LOCAL, "guarded")),
        ({"model": "lm_studio/a/b"}, {}, ("lm_studio", "a/b", LOCAL, "guarded")),
    ],
)
def test_a_deployment_is_read_as_litellm_reads_it(
    params: dict[str, Any], environ: dict[str, str], expected: tuple[str, str, str | None, str]
) -> None:
    """Its route is no part of its name; a name that LiteLLM knows needs no provider; variables have addresses."""
    read = deployment_of({"api_base": LOCAL, **params}, {}, group="g", environ={"OPENAI_API_KEY": "k", **environ})
    assert (read.provider, read.target.model, read.target.api_base, kind(read)) == expected
    # No server but that of the variables gets their key.
    assert read.target.api_key == ("k" if read.target.api_base == environ.get("OPENAI_BASE_URL") else None)


def test_only_a_local_network_may_be_asked() -> None:
    """Loopback, private addresses and local names may be LM Studio; a hosted provider's window is never asked for."""
    foreign = (
        *(None, "https://api.groq.com/openai/v1", "http://8.8.8.8:1234/v1", "https://[2606:4700::1111]/v1"),
        *("api.example.com/v1", "https://localhost.example.com/v1", "http://user:127.0.0.1@example.com/v1"),
    )
    hosts = ("127.0.0.1:1234", "localhost", "[::1]:1234", "192.168.1.9:1234", "studio.local:1234", "studio")
    local = ("127.0.0.1:1234", *(f"http://{host}/v1" for host in hosts))
    for api_base in (*foreign, *local):
        read = deployment("openai/x", api_base=api_base)
        assert (kind(read), read.target.is_lmstudio) == (
            ("asked", True) if api_base in local else ("foreign", False)
        ), api_base
    others = (("anthropic/claude", None), ("azure/gpt", "https://mine.openai.azure.com"))
    assert {kind(deployment(model, api_base=api_base)) for model, api_base in others} == {"foreign"}


@pytest.mark.parametrize("model", ["openai/x", "ollama/x", "hosted_vllm/x", "llamafile/x", "anthropic/x"])
@pytest.mark.parametrize("info", [{}, {"compaction": {"enabled": False}}, {"compaction": {"context_length": 4096}}])
async def test_without_opting_in_no_request_is_made(model: str, info: dict[str, Any]) -> None:
    """P7: a deployment that is not opted in is not guarded, and no server is asked for its window."""
    requests: list[str] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        requests.append(request.url.path)
        return httpx.Response(404, json={})

    async with httpx.AsyncClient(transport=httpx.MockTransport(refuse)) as http:
        windows = Windows(cache_s=5.0, http=http)
        guards = DeploymentSelector(LiveSettings(Settings()), windows)
        read = deployment(model, info, api_base=LOCAL)
        assert (read.opted_in, read.target.apis) == (None, ())
        assert await guards.guard(read) is None
        await windows.aclose()
    # A local OpenAI-compatible server is asked whether it is LM Studio, as ever; nothing else is asked of anybody.
    asks = model.startswith("openai/") and info != {"compaction": {"enabled": False}}
    assert requests == (["/lmstudio-greeting", "/api/v1/models", "/api/v0/models"] if asks else [])


class _Answering:
    """Windows of which only this is asked: whether a server is LM Studio, and how long the contexts are."""

    tokens: Mapping[str, int] = MappingProxyType({"a": 16384, "b": 4096})

    def __init__(self, *answers: bool | None) -> None:
        self._answers = list(answers)

    async def is_lmstudio(self, api_base: str, api_key: str | None) -> bool | None:
        return self._answers.pop(0)

    async def tokens_now(self, target: Target) -> int:
        return self.tokens[target.model]


async def test_the_smallest_of_a_pruning_models_windows_counts() -> None:
    """A summary may be asked of any of its deployments."""
    windows: Any = _Answering()
    entries = [{"model_name": "p", "litellm_params": {"model": f"lm_studio/{key}"}} for key in _Answering.tokens]
    router = SimpleNamespace(get_deployment=lambda _: None, get_model_list=lambda *_, **__: entries)
    target = await DeploymentSelector(LiveSettings(Settings()), windows).pruning_target(router, "p")
    assert target is not None
    assert target.model == "b"


@pytest.mark.parametrize(("told", "team"), [("red", "red"), (["red"], None)])
def test_fallbacks_are_followed_to_an_end(told: object, team: str | None) -> None:
    """A chain of groups, the first 64, each once; a team's own deployments, if it is one."""
    names = [*map(str, range(99))]
    router = SimpleNamespace(
        get_deployment=lambda _: None,
        get_model_list=lambda name, team_id: [{"model_name": name, "team": team_id}],
        fallbacks=[{one: [other, "0"]} for one, other in pairwise(names)],
        context_window_fallbacks=None,
        content_policy_fallbacks=None,
    )
    # By LiteLLM's own metadata, which are not the client's on all routes.
    for place in ("metadata", "litellm_metadata"):
        given = {
            "metadata": {"user_api_key_team_id": "blue"},
            place: {"user_api_key_team_id": told, "user_api_key": "k"},
        }
        found = reachable_entries(router, "0", given)
        assert found == [{"model_name": name, "team": team} for name in names[:64]]


async def test_wrong_settings_of_one_hide_no_other() -> None:
    """It may be added at run time: its own requests are refused."""
    entries = [
        {"model_name": name, "litellm_params": {"model": "lm_studio/x"}, "model_info": {"compaction": own}}
        for name, own in (("a", {}), ("b", {"bogus": 1}), ("c", None))
    ]
    router, windows = SimpleNamespace(get_model_list=lambda *_, **__: entries), cast("Any", None)
    guarded = DeploymentSelector(LiveSettings(Settings()), windows).guarded(router)
    assert [each.group async for each in guarded] == ["a", "c"]


async def test_a_silent_server_is_asked_again_and_a_warning_names_the_line_to_write(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A time-out is no "no": one that comes to answer as LM Studio is guarded from then on."""
    windows: Any = _Answering(None, None, True, False)
    guards = DeploymentSelector(LiveSettings(Settings()), windows)
    silent = deployment("openai/x", {}, api_base=LOCAL)
    assert [await guards.guard(silent) is not None for _ in range(4)] == [False, False, True, False]
    assert caplog.text.count("`model: lm_studio/…`") == 1


def test_the_answer_that_is_shown_is_what_is_set_aside_for_it() -> None:
    """A client takes it off the window, and asks for no more: the buffer of an empty prompt."""
    window = Window(tokens=8192, source="api/v1", instance_id="")
    for settings, answer_tokens in (
        ({}, 1638),
        ({"output_buffer_ratio": 0.5}, 4096),
        ({"output_buffer_ratio": 0}, 819),
    ):
        shown = {"max_input_tokens": 8192, "max_output_tokens": answer_tokens}
        assert limits_of(window, settings_of(**settings)) == shown


def test_the_transport_carries_what_it_can_reach() -> None:
    """Where LiteLLM asks the server by a client that can be given; the operator may choose the hooks."""
    reached = {("lm_studio/x", LOCAL), ("openai/x", LOCAL)}
    for model, base in (*reached, ("openai/x", None), ("ollama_chat/x", LOCAL)):
        carrier = "transport" if (model, base) in reached else "hooks"
        read = deployment(model, ON, api_base=base)
        assert (read.carrier, replace(read, settings=Settings(carrier="hooks")).carrier) == (carrier, "hooks")
    # Ollama is told to refuse what it would cut, beside the client's own fields; no other server is told anything.
    sent = refusing({"extra_body": {"top_k": 1, "truncate": True}}, "ollama_chat")
    assert sent == {"extra_body": {"top_k": 1, "truncate": False, "shift": False}}
    assert refusing({}, "hosted_vllm") == {}
