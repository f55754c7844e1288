"""LiteLLM's router: what we use of it, as entry points or, where it has none, as before.

Nothing is read with a default: a member that is gone would then be an answer, such as no fallback and no deployment.
`seams.py` looks at all of it before a request is guarded by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from litellm_compaction.errors import LiteLLMChanged
from litellm_compaction.proxy.litellm_inside import Seam

# Settings of the router by which we decide.
FALLBACKS = ("fallbacks", "context_window_fallbacks", "content_policy_fallbacks")
CHECKS = "enable_pre_call_checks"


def current_router() -> Any:
    """The router of the moment; the module's global is bound anew whenever the configuration is loaded."""
    return Seam.ROUTER.needed()


def deployment(router: Any, deployment_id: str) -> Any:
    """The router's own object of a deployment; None if it has none of this id."""
    if (registry := _view(router, "registry")) is not None:
        return _read("registry().deployment", lambda: registry.deployment(deployment_id))
    return _read("get_deployment", lambda: router.get_deployment(model_id=deployment_id))


def deployments(router: Any, name: str | None = None, team_id: str | None = None) -> Sequence[Any]:
    """The entries that serve a group, an alias or a name behind a wildcard; those of all groups without a name."""
    if (registry := _view(router, "registry")) is not None:
        return _read("registry().deployments", lambda: registry.deployments(name, team_id=team_id)) or ()
    return _read("get_model_list", lambda: router.get_model_list(model_name=name, team_id=team_id)) or ()


def setting(router: Any, name: str) -> object:
    """A setting of the router; None if its operator has not set it."""
    settings = _view(router, "settings")
    return _read(name, lambda: getattr(router if settings is None else settings, name))


def refuses_by_window(router: Any) -> bool:
    """LiteLLM itself refuses requests by the windows that its lists show."""
    return bool(setting(router, CHECKS))


def rewrite_info(router: Any, rewritten: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Puts what `rewritten` makes of each deployment's `model_info` in its place, all at once.

    An entry of the Rust core's list hands the whole list over with each write to it. So its writes go past that, and
    the list is assigned to itself once; every entry stays the object that it is.
    """
    registry = _view(router, "registry")
    entries = _read("model_list", lambda: router.model_list if registry is None else registry.all())
    is_changed = False
    for entry in entries:
        info = entry.get("model_info") if isinstance(entry, dict) else None
        if isinstance(info, dict) and (wanted := rewritten(info)) != info:
            dict.clear(info)
            dict.update(info, wanted)
            is_changed = True
    if is_changed:
        entries[:] = list(entries)


def add(router: Any, like: str, deployment_id: str, name: str, model: str) -> None:
    """Adds a deployment of this `model_name` and model, else like that of the id `like`, if that is still there."""
    found = deployment(router, like)
    if found is not None and deployment(router, deployment_id) is None:
        params = {**found.litellm_params.model_dump(exclude_none=True), "model": model}
        # A look at its health would make LM Studio load it.
        own = {"id": deployment_id, "disable_background_health_check": True}
        info = {**found.model_info.model_dump(exclude_none=True), **own}
        made = type(found)(model_name=name, litellm_params=params, model_info=info)
        _read("add_deployment", lambda: router.add_deployment(deployment=made))


def remove(router: Any, deployment_id: str) -> None:
    """Takes a deployment out of the router's list."""
    _read("delete_deployment", lambda: router.delete_deployment(id=deployment_id))


def _view(router: Any, name: str) -> Any:
    """One of the router's entry points; None in a LiteLLM that keeps the same as members of the router."""
    view = getattr(router, name, None)
    return _read(name, view) if callable(view) else None


def _read(member: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (AttributeError, TypeError) as error:
        raise LiteLLMChanged(f"Router.{member}") from error
