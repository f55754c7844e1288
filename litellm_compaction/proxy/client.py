"""Says who asks, and how: LiteLLM's metadata of a request, and the body and headers that its client sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

# Where LiteLLM looks for a key, in its order (proxy/auth/user_api_key_auth.py).
_KEY_HEADERS = ("x-litellm-api-key", "authorization", "api-key", "x-api-key", "x-goog-api-key")
_JSON = (dict, list, str, int, float, type(None))
_credential: ContextVar[str] = ContextVar("litellm_compaction_credential", default="")


def metadata_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """LiteLLM's metadata of a request and its client; {} without any.

    It writes into one of two places, depending on the route, and leaves the client's own metadata in the other one.
    LiteLLM takes a client's words about keys away (`add_litellm_data_to_request`), but only its own place has the
    object of the key, which no JSON can be.
    """
    places = [found for key in ("litellm_metadata", "metadata") if isinstance(found := body.get(key), Mapping)]
    named = [found for found in places if "user_api_key" in found]
    own = [found for found in named if not isinstance(found.get("user_api_key_auth"), _JSON)]
    written = next(iter([*own, *named]), body.get("metadata"))
    return written if isinstance(written, Mapping) else {}


def sections_of_owners(metadata: Mapping[str, Any]) -> Iterator[object]:
    """What the operator has written as `compaction` into the metadata of the key, and of its team; None for nothing."""
    for owner in ("user_api_key_metadata", "user_api_key_team_metadata"):
        written = metadata.get(owner)
        yield written.get("compaction") if isinstance(written, Mapping) else None


def is_off_for_owner(metadata: Mapping[str, Any]) -> bool:
    """Returns True if the operator has switched the guard off for the key, else for its team: `{"mode": "off"}`."""
    for section in sections_of_owners(metadata):
        mode = section.get("mode") if isinstance(section, Mapping) else section
        if mode is not None:
            return mode in ("off", False)
    return False


def identity_of(metadata: Mapping[str, Any]) -> str:
    """The team, or else the user, the key, or the value that the client has shown as one.

    Custom authentication may name none of them. If no key is asked for, all are one.
    """
    for name in ("team_id", "user_id", "hash"):
        if value := metadata.get(f"user_api_key_{name}"):
            return f"{name}:{value}"
    return _credential.get() or "nobody"


def tenant_of(metadata: Mapping[str, Any]) -> str:
    """A fingerprint of the client: events are shown to the same tenant."""
    return hashlib.blake2b(identity_of(metadata).encode(errors="replace"), digest_size=16).hexdigest()


def note_credential(headers: Mapping[str, str]) -> None:
    """Notes the running task's client's key as it was shown, for clients without an identity in LiteLLM."""
    lowered = {str(name).lower(): str(value) for name, value in headers.items()}
    shown = next((lowered[name] for name in _KEY_HEADERS if lowered.get(name)), "")
    key = shown.removeprefix("Bearer ").strip().encode(errors="replace")
    _credential.set(f"shown:{hashlib.blake2b(key, digest_size=16).hexdigest()}" if key else "")


def raw_headers(data: Mapping[str, Any]) -> Mapping[str, str]:
    """The headers of a request as they came, which LiteLLM keeps for itself in the pre-call hook's data."""
    secret = data.get("secret_fields")
    found = secret.get("raw_headers") if isinstance(secret, Mapping) else getattr(secret, "raw_headers", None)
    return found if isinstance(found, Mapping) else {}


def headers_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A request's headers by their names in lower case, as LiteLLM shows them to everybody; keys are left out."""
    request = body.get("proxy_server_request")
    headers = request.get("headers") if isinstance(request, Mapping) else None
    return {str(name).lower(): value for name, value in headers.items()} if isinstance(headers, Mapping) else {}


def sent_body(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A request's body as the client sent it, as far as LiteLLM keeps it."""
    request = body.get("proxy_server_request")
    original = request.get("body") if isinstance(request, Mapping) else None
    return original if isinstance(original, Mapping) else {}


def told_headers(body: Mapping[str, Any]) -> dict[str, str]:
    """`headers_of` that are texts, with the body's `client_metadata`, which is Codex's place for them."""
    metadata = sent_body(body).get("client_metadata")
    found = {**(metadata if isinstance(metadata, Mapping) else {}), **headers_of(body)}
    return {str(name).lower(): value for name, value in found.items() if isinstance(value, str)}
