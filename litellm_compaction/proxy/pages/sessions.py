"""How a browser stays signed in: its proxy key, encrypted, in a cookie that only the page's own forms can use.

The key travels and rests sealed, so that no worker has to remember a browser. Every look and every change is checked by
LiteLLM again with that key: a key that is blocked or deleted is out at once.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from cryptography.fernet import Fernet, InvalidToken

COOKIE = "litellm_compaction"
LIFETIME_S = 8 * 3600
# Above what any key or JWT needs; a browser keeps 4096 bytes of a cookie (RFC 6265, 6.1).
MAX_KEY_CHARS = 2048


class Sessions:
    """Seals and opens cookies.

    Args:
        secret: the same in all workers; None makes one that ends with this process.
    """

    def __init__(self, secret: str | None) -> None:
        material = secret.encode() if secret else secrets.token_bytes(32)
        # One key for each purpose, neither of them the secret itself.
        self._cipher = Fernet(base64.urlsafe_b64encode(_derived(material, b"cookie")))
        self._form_key = _derived(material, b"forms")

    def seal(self, key: str, now_s: float | None = None) -> str:
        """The cookie's value for a proxy key."""
        return self._cipher.encrypt_at_time(key.encode(), _whole(now_s)).decode("ascii")

    def open(self, cookie: str, now_s: float | None = None) -> str | None:
        """The proxy key in a cookie; None where it is too old or not ours."""
        try:
            return self._cipher.decrypt_at_time(cookie.encode(), LIFETIME_S, _whole(now_s)).decode()
        except (InvalidToken, ValueError):
            return None

    def form_token(self, cookie: str) -> str:
        """What a form must send along with the cookie: other sites know neither."""
        return hmac.new(self._form_key, cookie.encode(), hashlib.sha256).hexdigest()

    def is_form_token(self, cookie: str, token: str) -> bool:
        """Whether a form came from a page made for this cookie."""
        return hmac.compare_digest(self.form_token(cookie).encode(), token.encode(errors="replace"))


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


def _derived(material: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(
        b"litellm_compaction page " + purpose, key=hashlib.sha256(material).digest(), digest_size=32
    ).digest()


def _whole(now_s: float | None) -> int:
    return int(time.time() if now_s is None else now_s)
