"""Says who asks, and how, by LiteLLM's metadata of a request, and what it wishes of its compaction.

A wish stands in metadata or, for clients that cannot send any, in a header. Its words never reach a log or an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, Field, StringConstraints, ValidationError

from litellm_compaction.core.prompts import one_line_topic
from litellm_compaction.errors import BadWish

# The body of a request, or the arguments of a call that LiteLLM makes of it.
Body: TypeAlias = Mapping[str, Any]
# Where LiteLLM looks for a key, in its order (proxy/auth/user_api_key_auth.py).
_KEY_HEADERS = ("x-litellm-api-key", "authorization", "api-key", "x-api-key", "x-goog-api-key")
_JSON = (dict, list, str, int, float, type(None))
_HEADER, _PLACE = "x-litellm-compaction", "metadata.compaction"
_ALLOWED = (
    f'allowed: "now" or "off" there or in the header {_HEADER}, or there an object such as '
    '{"now": true, "focus": "the database schema", "pin": ["Never touch prod."]} with a focus only beside now, of at '
    "most 500 characters, and at most 32 pins of 1 to 1000"
)
_credential: ContextVar[str] = ContextVar("litellm_compaction_credential", default="")


def mapping(value: Any) -> Mapping[str, Any]:
    """A value of a request's or of LiteLLM's as a mapping; {} for anything else."""
    plain = value.model_dump() if hasattr(value, "model_dump") else value
    return plain if isinstance(plain, Mapping) else {}


def metadata_of(body: Body) -> Mapping[str, Any]:
    """LiteLLM's metadata of a request and its client; {} without any.

    The client's own may be in the other of two places: only LiteLLM's has the object of the key, which is no JSON.
    """
    places = [mapping(body.get(key)) for key in ("litellm_metadata", "metadata")]
    named = [place for place in places if "user_api_key" in place]
    own = [place for place in named if not isinstance(place.get("user_api_key_auth"), _JSON)]
    return next(iter([*own, *named, places[1]]))


def sections_of_owners(metadata: Mapping[str, Any]) -> Iterator[object]:
    """The operator's `compaction` in the metadata of the key, and of its team; None where there is none."""
    for owner in ("user_api_key_metadata", "user_api_key_team_metadata"):
        yield mapping(metadata.get(owner)).get("compaction")


def is_off_for_owner(metadata: Mapping[str, Any]) -> bool:
    """Returns True if the operator has switched the guard off for the key, else for its team: `{"mode": "off"}`."""
    modes = (each.get("mode") if isinstance(each, Mapping) else each for each in sections_of_owners(metadata))
    return next((mode in ("off", False) for mode in modes if mode is not None), False)


def opts_out(wish: Wish, metadata: Mapping[str, Any], *, is_allowed: bool) -> bool:
    """Returns True for a request that its client, if that `is_allowed`, or the owner of its key wants left alone."""
    return (is_allowed and wish.off) or is_off_for_owner(metadata)


def tenant_of(metadata: Mapping[str, Any]) -> str:
    """A fingerprint of the team, or else the user, the key, or the value that the client has shown as one."""
    owners = ((name, metadata.get(f"user_api_key_{name}")) for name in ("team_id", "user_id", "hash"))
    # Without keys all clients are one.
    return fingerprint(next((f"{name}:{value}" for name, value in owners if value), _credential.get() or "nobody"))


def fingerprint(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()


def note_credential(headers: Mapping[str, str]) -> None:
    """Notes the running task's client's key as it was shown, for clients without an identity in LiteLLM."""
    lowered = {str(name).lower(): str(value) for name, value in headers.items()}
    shown = next((lowered[name] for name in _KEY_HEADERS if lowered.get(name)), "")
    key = shown.removeprefix("Bearer ").strip()
    _credential.set(f"shown:{fingerprint(key)}" if key else "")


def raw_headers(data: Body) -> Mapping[str, str]:
    """The headers of a request as they came, which LiteLLM keeps for itself in the pre-call hook's data."""
    return mapping(mapping(data.get("secret_fields")).get("raw_headers"))


def headers_of(body: Body) -> dict[str, Any]:
    """A request's headers by their names in lower case, as LiteLLM shows them to everybody; keys are left out."""
    headers = mapping(mapping(body.get("proxy_server_request")).get("headers"))
    return {str(name).lower(): value for name, value in headers.items()}


def sent_body(body: Body) -> Mapping[str, Any]:
    """A request's body as the client sent it, as far as LiteLLM keeps it."""
    return mapping(mapping(body.get("proxy_server_request")).get("body"))


def told_headers(body: Body) -> dict[str, str]:
    """`headers_of` that are texts, with the body's `client_metadata`, which is Codex's place for them."""
    headers = {**mapping(sent_body(body).get("client_metadata")), **headers_of(body)}
    return {str(name).lower(): value for name, value in headers.items() if isinstance(value, str)}


_Pin: TypeAlias = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=1000)]


class Wish(BaseModel, frozen=True, strict=True, extra="forbid"):
    """`now`: whatever the fill, with `focus` as a topic; `pin` has words of messages that stay, None for no word."""

    off: bool = False
    now: bool = False
    focus: Annotated[str, AfterValidator(one_line_topic)] = ""
    pin: Annotated[list[_Pin], Field(max_length=32)] | None = None


NONE = Wish()
_OFF, _NOW = Wish(off=True), Wish(now=True)
_WORDS: Mapping[Any, Wish] = {None: NONE, True: NONE, "on": NONE, False: _OFF, "off": _OFF, "now": _NOW}


def wish_of(body: Body, metadata: Mapping[str, Any]) -> Wish:
    """The wish of a request, or a BadWish; `metadata`, LiteLLM's own, with the client's, goes before the header."""
    headers = headers_of(body)
    if any(f"{_HEADER}-{word}" in headers for word in ("now", "focus", "pin")):
        raise BadWish(f"This header is not read: a wish stands in {_PLACE}; {_ALLOWED}.")
    places = (metadata, mapping(metadata.get("requester_metadata")), {"compaction": headers.get(_HEADER) or None})
    value = next((value for place in places if (value := place.get("compaction")) is not None), None)
    try:
        # OpenAI's own metadata holds strings only.
        value = json.loads(value) if isinstance(value, str) and value.lstrip().startswith("{") else value
        if not isinstance(value, Mapping):
            return _WORDS[value]
        wish = Wish.model_validate({key: word for key, word in value.items() if word is not None})
    except ValidationError as error:
        problem = error.errors()[0]
        place = f"{_PLACE}.{str(problem['loc'][0])[:40]!r}"
        raise BadWish(f"{place}: {problem['msg'].removeprefix('Value error, ')}; {_ALLOWED}.") from None
    except (KeyError, TypeError, ValueError, RecursionError):
        raise BadWish(f"{_PLACE} cannot be read; {_ALLOWED}.") from None
    if wish.focus and not wish.now:
        raise BadWish(f"A focus is only used where the conversation is compacted now; {_ALLOWED}.")
    return wish
