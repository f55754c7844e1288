"""Lists what we touch of LiteLLM's inside: where each piece is, and what is lost if it is missing.

LiteLLM may move or drop any of it. Nobody gets an empty answer in its place unsaid: without a piece by which requests
are guarded nothing is sent to guarded models, and each other one that is missing is a WARNING, and a line of `doctor`.
Of the router, which is an object, nothing is read with a default: a member that is gone would then be an answer, such
as no fallback and no deployment. `look` reads all of it before a request is guarded by it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from importlib import import_module
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import httpx

from litellm_compaction.errors import LiteLLMChanged, StoreError
from litellm_compaction.proxy.client import mapping

logger = logging.getLogger("litellm_compaction")

# Where the proxy notes in its store what it lacks, for `doctor`: a line about the guard, "" if it stands, and one for
# each other thing.
LACKS = ("proxy", "litellm_lacks")
# No deployment has it, and nothing answers there (RFC 863): only a LiteLLM that passes no client on asks it.
_NOBODY, _NOWHERE = "litellm-compaction", "http://127.0.0.1:9/v1"
_ANSWER = {"object": "chat.completion", "choices": [{"message": {"role": "assistant", "content": "seen"}}]}
_PROXY, _CORE = "proxy.proxy_server", "litellm_core_utils"
_CHECKS = ("llms.anthropic.messages.caller_model_checks", "llms.anthropic.pass_through.caller_model_checks")
_OLD_CHECKS = "llms.anthropic.pass_through.context_management.editors.compact"
_SPEND = "proxy.spend_tracking.spend_tracking_utils"
# Settings of the router by which we decide; by the last one LiteLLM refuses requests by the windows in its lists.
FALLBACKS = ("fallbacks", "context_window_fallbacks", "content_policy_fallbacks")
CHECKS = "enable_pre_call_checks"
# Nothing else of a request's, such as a body that LiteLLM has read.
_KEPT_IN_SCOPE = ("type", "app", "asgi", "client", "http_version", "scheme", "server")
# The answers of LiteLLM's own checks for a call on a caller's behalf.
_ALLOWS = ("allowed", True)
_NO_REDIS = (
    "store: the proxy has no Redis of its own: set general_settings.coordination_redis, or REDIS_HOST and REDIS_PORT; "
    "or name one here: redis://host:6379/0"
)
# One machine's LM Studio serves a handful of requests at a time; the rest wait for a connection like for a slot. Idle
# connections end before the server closes them (Node.js: after 5 s): a request must not meet a closing one.
_IDLE_S = 2.0
_POOL_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=_IDLE_S)
_SWITCH = {"true": True, "1": True, "yes": True, "false": False}


class Seam(Enum):
    """A piece of LiteLLM's inside: what is lost without it, "" if nothing can be guarded then, and its places.

    A place is a module below `litellm`, and a path in it; what is called ends with brackets. The first that is there
    holds: LiteLLM has moved some.
    """

    SETTINGS = "", ":callback_settings"
    ROUTER = "", f"{_PROXY}:llm_router"
    REFUSAL = "", "proxy._types:ProxyException()"
    # A deployment's address may stand in one: without it nobody knows if that is guarded.
    CREDENTIALS = "", f"{_CORE}.credential_accessor:CredentialAccessor.get_credential_values()"

    OWN_CALLS = "no model writes summaries", f"{_CORE}.internal_call_metadata:sanitized_forwardable_call_metadata()"
    STOPPED_STREAMS = "stopped streams are not charged", f"{_CORE}.litellm_logging:Logging.dispatch_success_handlers()"
    CONFIG = "config.yaml is not checked, and no master key is made", f"{_PROXY}:proxy_config.get_config_state()"
    REQUESTS = "no route counts or compacts, beats, or ends with its client", f"{_PROXY}:app.router.middleware_stack()"
    PAGE = "the page and the routes of recall and records are missing", f"{_PROXY}:app"
    KEYS = "the page and the routes beside it answer nobody", "proxy.auth.user_api_key_auth:user_api_key_auth()"
    MASTER_KEY = "what is stored, and what clients keep, is not encrypted", f"{_PROXY}:master_key"
    DATABASE = "what stands before a `previous_response_id` is not looked for", f"{_PROXY}:prisma_client"
    KEPT_PROMPTS = (
        "a `previous_response_id` whose messages are not kept is answered without them",
        *(f"{_SPEND}:{prefix}should_store_prompts_and_responses_in_spend_logs()" for prefix in ("", "_")),
    )
    REDIS = "`store: redis` has no connection", f"{_PROXY}:redis_usage_cache"
    REDIS_CLIENT = "commands cannot reach the proxy's Redis", "_redis:get_redis_async_client()"
    POOL = "streams cost more of the processor", "llms.custom_httpx.aiohttp_transport:LiteLLMAiohttpTransport()"
    ACCESS = (
        "no key with a list of models may use a pruning model, and lists of users do not hold for it",
        *(f"{module}:caller_can_call_model()" for module in _CHECKS),
        f"{_OLD_CHECKS}:_check_summary_model_access()",
    )
    BUDGET = (
        "budgets for a pruning model do not hold for summaries",
        *(f"{module}:caller_within_model_budget()" for module in _CHECKS),
        f"{_OLD_CHECKS}:_check_summary_model_budget()",
    )

    def __init__(self, lost: str, *places: str) -> None:
        self.lost = lost
        self.places = places

    def __str__(self) -> str:
        module, _, path = self.places[0].partition(":")
        return f"{module.rpartition('.')[2] or 'litellm'}.{path.removesuffix('()')}"

    @property
    def is_missing(self) -> bool:
        """LiteLLM is there, in a proxy where that is needed, and has no such piece."""
        return self.get(self) is self

    def get(self, default: object = None) -> Any:
        """The piece; `default` if it is missing, which `missing` tells; None for one of a proxy outside of any."""
        # Importing the proxy's own takes seconds, and outside of one they say nothing.
        is_outside = self.places[0].startswith("proxy.") and "litellm.proxy.proxy_server" not in sys.modules
        return None if is_outside else self.needed(default)

    def needed(self, *default: object) -> Any:
        """The piece, also outside of a proxy; raises LiteLLMChanged if it is missing, and there is no default."""
        for module, look, is_called in map(_read, self.places):
            with contextlib.suppress(ImportError, AttributeError):
                piece = look(import_module(module))
                if callable(piece) or not is_called:
                    return piece
        if default:
            return default[0]
        raise LiteLLMChanged(str(self))


@functools.lru_cache
def _read(place: str) -> tuple[str, Callable[[Any], Any], bool]:
    """A place's module, what finds its piece there, and if that is called."""
    module, _, path = place.partition(":")
    return f"litellm.{module}".removesuffix("."), attrgetter(path.removesuffix("()")), path.endswith("()")


def missing() -> list[str]:
    """Tells what LiteLLM lacks beside what requests are guarded by, each in a sentence, which the log gets, too."""
    lacks = [
        f"{seam} of LiteLLM's is missing or has changed: {seam.lost}." for seam in Seam if seam.lost and seam.is_missing
    ]
    for said in lacks:
        logger.warning("%s", said)
    return lacks


# ------------------------------------------------------------------ the router


def current_router() -> Any:
    """The router of the moment; the module's global is bound anew whenever the configuration is loaded."""
    return Seam.ROUTER.needed()


def deployment(router: Any, deployment_id: str) -> Mapping[str, Any]:
    """The entry of a deployment; {} if the router has none of this id."""
    return mapping(_own(router, deployment_id))


def _own(router: Any, deployment_id: str) -> Any:
    return _asked(router, "registry", "deployment", "get_deployment", lambda member: member(deployment_id))


def deployments(router: Any, name: str | None = None, team_id: str | None = None) -> list[Mapping[str, Any]]:
    """The entries that serve a group, an alias or a name behind a wildcard; those of all groups without a name."""
    listed = _asked(router, "registry", "deployments", "get_model_list", lambda member: member(name, team_id=team_id))
    return [*map(mapping, listed or ())]


def setting(router: Any, name: str) -> object:
    """A setting of the router; None if its operator has not set it."""
    return _asked(router, "settings", name, name, lambda member: member)


def _asked(router: Any, view: str, name: str, old_name: str, ask: Callable[[Any], Any]) -> Any:
    """Has `ask` read a member of the router's `view` or, in a LiteLLM without that, the router's own."""
    is_new = callable(getattr(router, view, None))
    try:
        return ask(getattr(getattr(router, view)(), name) if is_new else getattr(router, old_name))
    except (AttributeError, TypeError) as error:
        raise LiteLLMChanged(f"Router.{f'{view}().{name}' if is_new else old_name}") from error


def rewrite_info(router: Any, rewritten: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Puts what `rewritten` makes of each deployment's `model_info` in its place, all at once.

    An entry of the Rust core's list hands the whole list over with each write to it. So its writes go past that, and
    the list is assigned to itself once; every entry stays the object that it is.
    """
    entries = router.registry().all() if hasattr(router, "registry") else router.model_list
    infos = [entry.get("model_info") for entry in entries if isinstance(entry, dict)]
    changes = [(info, new) for info in infos if isinstance(info, dict) and (new := rewritten(info)) != info]
    for info, new in changes:
        dict.clear(info)
        dict.update(info, new)
    if changes:
        entries[:] = list(entries)


def add(router: Any, like: str, deployment_id: str, name: str, model: str) -> None:
    """Adds a deployment of this `model_name` and model, else like that of the id `like`, if that is still there."""
    wildcard = _own(router, like)
    if wildcard is not None and _own(router, deployment_id) is None:
        params = {**wildcard.litellm_params.model_dump(), "model": model}
        # A look at its health would make LM Studio load it.
        own = {"id": deployment_id, "disable_background_health_check": True}
        info = {**wildcard.model_info.model_dump(), **own}
        router.add_deployment(deployment=type(wildcard)(model_name=name, litellm_params=params, model_info=info))


# ------------------------------------------------------------------ what stands before a request is guarded


def check_classes(hooks: Iterable[str]) -> None:
    """Raises LiteLLMChanged if nobody would call `hooks`, which we fill, or if a piece is missing that guards all."""
    from litellm.integrations.custom_logger import CustomLogger

    lacking = [f"CustomLogger.{name}" for name in hooks if not hasattr(CustomLogger, name)]
    lacking += [str(seam) for seam in Seam if not seam.lost and seam.is_missing]
    if lacking:
        raise LiteLLMChanged(lacking[0])


async def look(place: tuple[Any, bool]) -> LiteLLMChanged | None:
    """Tells what a router lacks by which requests are guarded, and the log; and a client, if True stands beside it."""
    router, is_carried = place
    try:
        deployment(router, _NOBODY)
        deployments(router)
        for name in (*FALLBACKS, CHECKS):
            setting(router, name)
        if is_carried:
            await _look_at_client()
    except LiteLLMChanged as error:
        logger.error("%s", error)  # noqa: TRY400 - the message is the finding
        return error
    return None


async def _look_at_client() -> None:
    """Has LiteLLM make a call whose client answers by itself; no other callback is told of it.

    Raises LiteLLMChanged if it does not pass on the client, with which our transport carries answers.
    """
    import litellm
    from openai import AsyncOpenAI

    from litellm_compaction.proxy.internal import as_ours

    calls: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        return httpx.Response(200, json=_ANSWER)

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    place: dict[str, Any] = {"api_key": _NOBODY, "base_url": _NOWHERE}
    options: dict[str, Any] = {"timeout": 10.0, "max_retries": 0, "num_retries": 0, "no-log": True}
    async with AsyncOpenAI(**place, http_client=http) as client:
        options |= {"messages": [{"role": "user", "content": "."}], "client": client}
        with contextlib.suppress(Exception), as_ours():
            await litellm.acompletion(f"lm_studio/{_NOBODY}", **place, **options)
    if not calls:
        raise LiteLLMChanged("client=", "Or set `carrier: hooks`, which passes no client on.")


def with_chats(client: Any, create: Callable[..., Any]) -> Any:
    """OpenAI's client, of whose `create` LiteLLM up to 1.107 asks for a chat; a newer one posts it by the client."""
    client.chat.completions.with_raw_response = SimpleNamespace(create=create)
    return client


# ------------------------------------------------------------------ the proxy


def configuration() -> Mapping[str, Any]:
    """The configuration that is being loaded; empty outside the proxy."""
    read = Seam.CONFIG.get()
    return mapping(read() if read is not None else None)


def keeps_responses() -> bool:
    """LiteLLM finds the messages before a `previous_response_id`: it keeps prompts in its database."""
    keeps = Seam.KEPT_PROMPTS.get()
    return Seam.DATABASE.get() is not None and (keeps is None or bool(keeps()))


def proxy_secret() -> str | None:
    """The proxy's master key; None before the configuration is loaded, and without one."""
    key = Seam.MASTER_KEY.get()
    return key if isinstance(key, str) and key else None


def wrap_requests(make: Callable[[Any], Any]) -> None:
    """Puts what is made of the proxy's ASGI application in its place, inside of all middleware."""
    if (application := Seam.REQUESTS.get()) is not None:
        # What was put there before goes.
        inner = getattr(application, "__wrapped__", application)
        Seam.PAGE.needed().router.middleware_stack = functools.update_wrapper(make(inner), inner)


# ------------------------------------------------------------------ keys


async def key_owner(request: Any, path: str) -> Any:
    """Returns LiteLLM's record of the key that a request shows, as if it asked to GET `path`; else its error."""
    user_api_key_auth = Seam.KEYS.needed()
    # As a POST it could be refused for what its body does not have (`enforce_user_param`).
    get = {"method": "GET", "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "state": {}}
    scope = {name: request.scope[name] for name in _KEPT_IN_SCOPE if name in request.scope}
    headers = [each for each in request.headers.raw if each[0] != b"cookie" and not each[0].startswith(b"content-")]

    async def nothing() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    look = type(request)({**scope, **get, "headers": headers}, nothing)
    # FastAPI calls it so: a parameter that is left out would be its marker in place of a header's value.
    markers = {name: each.default for name, each in inspect.signature(user_api_key_auth).parameters.items()}
    given = {name: await each.dependency(look) for name, each in markers.items() if hasattr(each, "dependency")}
    return await user_api_key_auth(request=look, **given)


async def is_allowed(router: Any, model: str, metadata: Mapping[str, Any]) -> bool:
    """True if LiteLLM would let a key call a `model_name`: by all lists of models, and the budgets for that model."""
    # A call through the router skips the proxy's own check.
    if (auth := metadata.get("user_api_key_auth")) is None:
        return True
    access, budget = Seam.ACCESS.get(), Seam.BUDGET.get()
    # Anything else than LiteLLM's own object is nobody's word.
    if access is None and any(getattr(auth, name, True) for name in ("models", "team_models")):
        return False
    # By position: the first three mean the same in all versions.
    checks = (access, (auth, model, router)), (budget, (auth, model))
    try:
        return all([check is None or await check(*given) in _ALLOWS for check, given in checks])
    except Exception:  # noqa: BLE001 - fails closed, as LiteLLM's own checks do
        return False


def has_limits(metadata: Mapping[str, Any]) -> bool:
    """True if any limit or budget is set for the caller, its metadata or its team's, whatever LiteLLM calls it."""
    fields = dict(metadata.get("user_api_key_auth") or {})
    holders = [fields, *(fields.get(name) or {} for name in ("metadata", "team_metadata"))]
    limits = [holder[name] for holder in holders for name in holder if "limit" in name or "budget" in name]
    # A limit of 0 is one.
    return any(value is not None and value is not False and value not in ({}, []) for value in limits)


# ------------------------------------------------------------------ connections


def proxy_redis() -> Any:
    """The client of the Redis by which LiteLLM's workers coordinate themselves, for the running event loop."""
    connect = getattr(Seam.REDIS.get(), "init_async_client", None)
    if connect is None:
        raise StoreError(_NO_REDIS)
    return connect()


def redis_of(config: Mapping[str, object]) -> Callable[[], Any]:
    """Returns a maker of clients, outside of the proxy, of the Redis that `coordination_redis` or variables name."""
    block = mapping(mapping(config.get("general_settings")).get("coordination_redis"))

    def make() -> Any:
        try:
            return Seam.REDIS_CLIENT.needed()(**{name: value for name, value in block.items() if value is not None})
        except (LiteLLMChanged, TypeError, ValueError):
            raise StoreError(_NO_REDIS) from None

    return make


def connect() -> httpx.AsyncBaseTransport:
    """A transport with a connection pool, for the running loop; it goes past the proxies of the environment."""
    import litellm

    # LiteLLM's `litellm_settings.ssl_verify`: a switch, or a bundle of certificates.
    verify = os.environ.get("SSL_VERIFY", getattr(litellm, "ssl_verify", True))
    verify = _SWITCH.get(verify.strip().lower(), verify) if isinstance(verify, str) else verify is not False
    context, inherited = httpx.create_ssl_context(verify=verify), Seam.POOL.get()
    is_off = os.environ.get("DISABLE_AIOHTTP_TRANSPORT", "").strip().lower()
    if inherited is None or _SWITCH.get(is_off, False) or getattr(litellm, "disable_aiohttp_transport", False):
        return httpx.AsyncHTTPTransport(verify=context, limits=_POOL_LIMITS)
    from aiohttp import ClientSession, DummyCookieJar, TCPConnector

    class Transport(inherited):  # type: ignore[misc, valid-type] # LiteLLM is not typed strictly enough to check
        async def _get_proxy_settings(self, request: httpx.Request) -> None:
            return None

    def session() -> ClientSession:
        connector = TCPConnector(limit=0, keepalive_timeout=_IDLE_S, ssl=context)
        return ClientSession(connector=connector, cookie_jar=DummyCookieJar())

    transport: httpx.AsyncBaseTransport = Transport(client=session)
    return transport
