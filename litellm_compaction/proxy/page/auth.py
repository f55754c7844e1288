"""Who looks at the page, and how a browser stays signed in.

LiteLLM's own answer decides. Administrators see everything and may write; those who may only view see everything;
everybody else sees what their own team, user or key has done, and the models that they may call.

The key travels and rests sealed, encrypted in a cookie that only the page's own forms can use, so that no worker has
to remember a browser that is signed in. Every look and every change is checked by LiteLLM again with that key: a key
that is blocked or deleted is out at once. What is remembered is who has signed out, and which addresses have tried
wrong keys.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ipaddress
import json
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, TypeVar
from urllib.parse import urlsplit

from cryptography.fernet import Fernet, InvalidToken
from fastapi import Request

from litellm_compaction.concurrency import Bounded
from litellm_compaction.errors import CompactionError
from litellm_compaction.master_key import derived, stretched
from litellm_compaction.proxy.deployments import note_credential, tenant_of
from litellm_compaction.proxy.litellm_api import may_use
from litellm_compaction.stores import Store

# LiteLLM refuses a path that it does not know to everybody but administrators (auth/route_checks.py, 1.106.2). Whoever
# may list models may look here.
_KNOWN_PATH = "/v1/models"
_WRITER, _VIEWER = "proxy_admin", "proxy_admin_viewer"
_KEY_HEADERS = ("authorization", "x-litellm-api-key", "api-key", "x-api-key")
_KEPT_IN_SCOPE = ("app", "asgi", "client", "http_version", "scheme", "server")
COOKIE = "litellm_compaction"
LIFETIME_S = 8 * 3600
# Above what any key or JWT needs; a browser keeps 4096 bytes of a cookie (RFC 6265, 6.1).
MAX_KEY_CHARS = 2048
_SCOPE, _SIGNED_OUT = "page", "signed_out"
# Of one key, by which nobody's session but its own holders' can come back, and of all.
_MAX_SIGNED_OUT_OF_KEY, _MAX_SIGNED_OUT = 50, 5000
_FORWARDED = "forwarded"
_FREE_TRIES = 3
_FIRST_DELAY_S, _MOST_DELAY_S = 0.25, 5.0
_FORGIVEN_S = 600.0
_MAX_ADDRESSES = 4096
# So many of one address wait for each other; those behind them are not looked at.
_MAX_WAITING = 8
_MAX_RIGHT = 4096


@dataclass(frozen=True, slots=True)
class Visitor:
    """Somebody with a valid key.

    Attributes:
        role: as LiteLLM calls it; "" where it does not say.
        tenant: as in events.
        auth: LiteLLM's record of the key.
    """

    role: str
    tenant: str
    auth: Any

    @property
    def may_write(self) -> bool:
        """Whether settings may be changed."""
        return self.role == _WRITER

    @property
    def sees_all(self) -> bool:
        """Whether other tenants' numbers are shown."""
        return self.role in (_WRITER, _VIEWER)

    @property
    def tenant_seen(self) -> str:
        """Whose numbers are shown; "" for everybody's."""
        return "" if self.sees_all else self.tenant

    def may_see(self, router: Any, model: str) -> bool:
        """Whether a model's name is shown."""
        return self.sees_all or may_use(router, model, {"user_api_key_auth": self.auth})


def shows_key(request: Request) -> bool:
    """Whether a request's headers have a key, be it a good one or not."""
    return any(name in request.headers for name in (*_KEY_HEADERS, _own_header()) if name)


def keys_shown(request: Request) -> str:
    """All that a request's headers have for keys, to tell whether it is the same as another's; "" for none."""
    names = (*_KEY_HEADERS, _own_header())
    return "\n".join(value for name in names if name and (value := request.headers.get(name)))


def address_of(request: Request) -> str:
    """Whose request it is, for counting wrong keys; "" where nobody says.

    Behind reverse proxies that the operator has LiteLLM trust (`general_settings.trusted_proxy_ranges`) the last
    address that none of them has. `use_x_forwarded_for` alone trusts what any client can write;
    so does uvicorn, which puts the header's address in the peer's place for peers in `forwarded_allow_ips` (loopback):
    without such ranges all requests that have the header count as one address. An IPv6 subscriber has
    2**64 addresses or more (RFC 6177), which count as one.
    """
    found = request.client.host if request.client else ""
    forwarded = "x-forwarded-for" in request.headers
    try:
        from litellm.proxy.auth.network import TrustedProxyConfig, resolve_client_ip
        from litellm.proxy.auth.trusted_proxy_utils import get_trusted_proxy_cidrs

        ranges = get_trusted_proxy_cidrs()
        if found and forwarded and not ranges:
            return _FORWARDED
        config = TrustedProxyConfig(use_forwarded_for=bool(ranges), trusted_proxy_cidrs=ranges)
        found = resolve_client_ip(request, config)[0] or ""
    except (ImportError, AttributeError, TypeError, ValueError):
        # An older LiteLLM, which knows no such proxies.
        pass
    try:
        address = ipaddress.ip_address(found)
    except ValueError:
        return found
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


def _own_header() -> str:
    """The header in which this proxy looks for a key besides the usual ones; "" for none."""
    from litellm.proxy import proxy_server

    name = (proxy_server.general_settings or {}).get("litellm_key_header_name")
    return name.lower() if isinstance(name, str) else ""


async def visitor_of(request: Request, key: str | None) -> Visitor | None:
    """Who asks, as LiteLLM sees it; None where it refuses.

    Args:
        request: the browser's or a script's; its own headers may carry a key.
        key: of a cookie or the sign-in form, in place of the headers'; None for those.
    """
    from litellm.proxy.auth.user_api_key_auth import user_api_key_auth

    headers = {name.lower(): value for name, value in request.headers.items() if name.lower() != "cookie"}
    if key is not None:
        headers = {name: value for name, value in headers.items() if name not in ("x-litellm-api-key", "x-api-key")}
        headers["authorization"] = f"Bearer {key}"
        if own_name := _own_header():
            headers[own_name] = f"Bearer {key}"
    given = {
        "api_key": headers.get("authorization"),
        "azure_api_key_header": headers.get("api-key"),
        "anthropic_api_key_header": headers.get("x-api-key"),
        "custom_litellm_key_header": headers.get("x-litellm-api-key"),
    }
    # FastAPI fills these in; a parameter that is left out would be its marker in place of a value.
    names = [name for name in signature(user_api_key_auth).parameters if name != "request"]
    try:
        auth = await user_api_key_auth(
            request=_as_known_path(request, headers), **{name: given.get(name) for name in names}
        )
    except Exception:  # noqa: BLE001 - whatever it raises is a no
        # Not only its own errors: without `prisma`, 1.106.2 ends with a ModuleNotFoundError at a wrong key.
        return None
    note_credential(headers)
    role = getattr(auth, "user_role", None)
    return Visitor(role=str(getattr(role, "value", role) or ""), tenant=tenant_of(_metadata_of(auth)), auth=auth)


def _as_known_path(request: Request, headers: Mapping[str, str]) -> Request:
    scope = {name: request.scope[name] for name in _KEPT_IN_SCOPE if name in request.scope}
    scope |= {
        "type": "http",
        "method": "GET",
        "path": _KNOWN_PATH,
        "raw_path": _KNOWN_PATH.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (name.encode("latin-1"), value.encode("latin-1", "replace"))
            for name, value in headers.items()
            if not name.startswith("content-")
        ],
        "state": {},
    }

    async def nothing() -> Mapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    return Request(scope, nothing)  # type: ignore[arg-type] # starlette's messages are mutable mappings


def _metadata_of(auth: Any) -> Mapping[str, Any]:
    """What LiteLLM would write into the metadata of this key's requests (litellm_pre_call_utils.py:1691, 1.106.2)."""
    key = getattr(auth, "api_key", None)
    if getattr(auth, "is_session_token", False):
        key = getattr(auth, "key_alias", None) or key
    return {
        "user_api_key_team_id": getattr(auth, "team_id", None),
        "user_api_key_user_id": getattr(auth, "user_id", None),
        "user_api_key_hash": key,
    }


_Found = TypeVar("_Found")


class Sessions:
    """Seals and opens cookies.

    Args:
        secret: the same in all workers; None makes one that ends with this process.
    """

    def __init__(self, secret: str | None) -> None:
        material = stretched(secret) if secret else secrets.token_bytes(32)
        self._cipher = Fernet(base64.urlsafe_b64encode(derived(material, b"cookie")))
        self._form_key = derived(material, b"forms")

    def seal(self, key: str, now_s: float | None = None) -> str:
        """The cookie's value for a proxy key."""
        return self._cipher.encrypt_at_time(key.encode(), _whole(now_s)).decode("ascii")

    def open(self, cookie: str, now_s: float | None = None) -> str | None:
        """The proxy key in a cookie; None where it is too old or not ours."""
        try:
            return self._cipher.decrypt_at_time(cookie.encode(), LIFETIME_S, _whole(now_s)).decode()
        except (InvalidToken, ValueError):
            return None

    def owner(self, cookie: str) -> str:
        """What tells one key's cookies from another's, without the key; "" for a cookie that is over or not ours."""
        key = self.open(cookie)
        return hmac.new(self._form_key, b"owner " + key.encode(), hashlib.sha256).hexdigest()[:16] if key else ""

    def form_token(self, cookie: str) -> str:
        """What a form must send along with the cookie: other sites know neither."""
        return hmac.new(self._form_key, cookie.encode(), hashlib.sha256).hexdigest()

    def is_form_token(self, cookie: str, token: str) -> bool:
        """Whether a form came from a page made for this cookie."""
        return hmac.compare_digest(self.form_token(cookie).encode(), token.encode(errors="replace"))


class SignedOut:
    """The cookies whose sessions were ended before their time, for all workers.

    Args:
        store: shared by them; what it cannot keep, this worker keeps.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._own: dict[str, float] = {}

    async def add(self, cookie: str, now_s: float | None = None, *, owner: str = "") -> None:
        """Ends a cookie's session; `owner` tells whose key is in it."""
        now = _whole(now_s)
        # Also those that are over by this clock: set back, it would let them in again. The oldest are over soonest.
        name = _fingerprint(cookie, owner)
        self._own = _bounded({**await self._known(), name: float(now + LIFETIME_S)}, name)
        with contextlib.suppress(CompactionError):
            await self._store.merge_fact(_SCOPE, _SIGNED_OUT, json.dumps(self._own), _both_signed_out)

    async def has(self, cookie: str, *, owner: str = "") -> bool:
        """Whether a cookie's session was ended."""
        return _fingerprint(cookie, owner) in await self._known()

    async def _known(self) -> dict[str, float]:
        try:
            return {**self._own, **_parsed(await self._store.get_fact(_SCOPE, _SIGNED_OUT) or "{}")}
        except CompactionError:
            return self._own


def _both_signed_out(kept: str, own: str) -> str:
    """The sessions that two workers have ended, those that would last longest."""
    known, more = _parsed(kept), _parsed(own)
    both = {name: max(known.get(name, 0.0), more.get(name, 0.0)) for name in {**known, **more}}
    return json.dumps(_bounded(both))


def _bounded(ended: Mapping[str, float], newest: str = "") -> dict[str, float]:
    """Of each key, and of all, the sessions that would last longest; `newest` among them."""
    kept: dict[str, float] = {}
    of_key: Counter[str] = Counter()
    for name, until_s in sorted(ended.items(), key=lambda item: (item[0] != newest, -item[1], item[0])):
        owner = name.partition(":")[0]
        of_key[owner] += 1
        if of_key[owner] <= _MAX_SIGNED_OUT_OF_KEY and len(kept) < _MAX_SIGNED_OUT:
            kept[name] = until_s
    return kept


def _parsed(text: str) -> dict[str, float]:
    """Until when sessions would have lasted; empty where nobody here has written this."""
    try:
        return {str(name): float(until_s) for name, until_s in json.loads(text).items()}
    except (RecursionError, ValueError, TypeError, AttributeError):
        return {}


class TooManyTries(Exception):
    """So many wrong keys came from an address that this one was not looked at."""


@dataclass(slots=True)
class _Lane:
    """The tries of one address that are under way."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    tries: int = 0


class WrongKeys:
    """Answers tries of one address one behind the other, wrong ones ever later.

    A right key waits for nothing but wrong ones of the same address that came before it, and one that has been right
    before not for them either: many people may share one address, whoever floods the page among them. There is no limit
    for all addresses together, by which a few would keep everybody out: keys are too long to be guessed at any rate.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._tries: Bounded[str, tuple[int, float]] = Bounded(_MAX_ADDRESSES)
        self._lanes: dict[str, _Lane] = {}
        self._salt = secrets.token_bytes(16)
        self._right: Bounded[bytes, None] = Bounded(_MAX_RIGHT)

    async def tried(self, address: str, look: Callable[[], Awaitable[_Found | None]], key: str = "") -> _Found | None:
        """What a look at a key finds; None for a wrong one, which is answered when its time has come.

        Args:
            address: who tries it.
            look: at the key.
            key: to know it again, as a hash of this process.

        Raises:
            TooManyTries: others of this address wait already.
        """
        name = hashlib.blake2b(key.encode(errors="replace"), digest_size=16, key=self._salt).digest()
        if key and name in self._right:
            found = await look()
            if found is None:
                self._right.pop(name, None)
                await self._sleep(self.delay_s(address))
            return found
        found = await self._in_turn(address, look)
        if key and found is not None:
            self._right[name] = None
        return found

    async def _in_turn(self, address: str, look: Callable[[], Awaitable[_Found | None]]) -> _Found | None:
        lane = self._lanes.setdefault(address, _Lane())
        lane.tries += 1
        try:
            async with lane.turn:
                if lane.tries > _MAX_WAITING and self._count(address) >= _FREE_TRIES:
                    raise TooManyTries
                found = await look()
                if found is None:
                    await self._sleep(self.delay_s(address))
                return found
        finally:
            lane.tries -= 1
            if not lane.tries:
                self._lanes.pop(address, None)

    def _count(self, address: str) -> int:
        count, last_s = self._tries.get(address, (0, 0.0))
        return count if self._clock() - last_s < _FORGIVEN_S else 0

    def delay_s(self, address: str) -> float:
        """Notes one more wrong key; the first few cost nothing, each later one twice the one before."""
        count = self._count(address) + 1
        self._tries[address] = count, self._clock()
        return 0.0 if count <= _FREE_TRIES else min(_FIRST_DELAY_S * 2.0 ** min(count - _FREE_TRIES, 10), _MOST_DELAY_S)


def is_own_request(method: str, headers: Mapping[str, str]) -> bool:
    """Whether what a browser sends by itself counts: the request comes from the page, opens it, or is a script's own.

    SameSite is not enough: other ports of a host are the same site, and LiteLLM's CORS settings let any origin read
    what a request with credentials answers (proxy_server.py, 1.106.2: `allow_origins`). Browsers send `Sec-Fetch-Site`
    to https and loopback addresses (W3C, Fetch Metadata), and `Origin` with everything else that a script can read.

    Args:
        method: in capitals.
        headers: of the request, names in lower case.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none") or (method == "GET" and headers.get("sec-fetch-mode") == "navigate")
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


def _fingerprint(cookie: str, owner: str) -> str:
    return f"{owner}:{hashlib.blake2b(cookie.encode(errors='replace'), digest_size=16).hexdigest()}"


def _whole(now_s: float | None) -> int:
    return int(time.time() if now_s is None else now_s)
