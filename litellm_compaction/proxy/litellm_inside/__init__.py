"""Lists what we touch of LiteLLM's inside: where each piece is, and what is lost if it is missing.

LiteLLM may move or drop any of it. Nobody gets an empty answer in its place unsaid: without a piece by which requests
are guarded nothing is sent to guarded models, and each other one that is missing is a WARNING, and a line of `doctor`.
Of the router, which is an object, nothing is read with a default: a member that is gone would then be an answer, such
as no fallback and no deployment. `look` reads all of it before a request is guarded by it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from importlib import import_module
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import httpx

from litellm_compaction.errors import LiteLLMChanged
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
    REQUESTS = "no route counts or compacts alone, or ends with its client", f"{_PROXY}:app.router.middleware_stack()"
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


@lru_cache
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
    if wildcard is not None and not deployment(router, deployment_id):
        params = {**wildcard.litellm_params.model_dump(), "model": model}
        # A look at its health would make LM Studio load it.
        own = {"id": deployment_id, "disable_background_health_check": True}
        info = {**wildcard.model_info.model_dump(), **own}
        router.add_deployment(deployment=type(wildcard)(model_name=name, litellm_params=params, model_info=info))


def remove(router: Any, deployment_id: str) -> None:
    """Takes a deployment out of the router's list."""
    router.delete_deployment(id=deployment_id)


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
