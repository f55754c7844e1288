"""Threat: the page, the terminal and the log as ways in, or as places where strangers' text acts (issue 12)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI, Request

from litellm_compaction.cli import main
from litellm_compaction.config import settings_from
from litellm_compaction.events import HarmlessRecords, harmless
from litellm_compaction.paths import make_private
from litellm_compaction.proxy.callback import CompactionHandler
from litellm_compaction.proxy.page import auth, routes
from litellm_compaction.proxy.page.auth import (
    COOKIE,
    LIFETIME_S,
    Sessions,
    SignedOut,
    TooManyTries,
    Visitor,
    WrongKeys,
    is_own_request,
)
from litellm_compaction.proxy.page.data import Surroundings
from litellm_compaction.stores import MemoryStore
from tests.security.hooks import Router

# LiteLLM's own, while its proxy is imported.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

# What terminals and editors obey, as a model's name may have it.
_COMMANDS = {
    "colour": "\x1b[31mqwen",
    "title": "\x1b]0;owned\x07",
    "8-bit escape": "\x9b31mqwen",
    "new line": "qwen\n2026-01-01 ERROR forged",
    "carriage return": "qwen\rforged",
    "backspace": "qwen\x08\x08",
    "right to left": "qwen\u202enewq",
    "isolate": "qwen\u2066x",
    "unseen": "qwen\u200b",
    "line separator": "qwen\u2028x",
}


@pytest.mark.parametrize("name", _COMMANDS.values(), ids=_COMMANDS)
def test_names_do_not_command_a_terminal_or_forge_a_log_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """They are spelled out; ordinary names in any script stay as they are."""
    assert harmless(name).isprintable()
    assert harmless("qwen-3 ü 模型 🙂") == "qwen-3 ü 模型 🙂"
    logger = logging.getLogger("harmless")
    logger.addFilter(HarmlessRecords())
    logger.warning("compacted model=%s tokens=%d", name, 7)
    assert caplog.messages[-1].isprintable()
    assert caplog.messages[-1].endswith("tokens=7")


_REQUEST = json.dumps({"messages": [{"role": "\x1b[31mu\x9bser", "content": "hi"}]})
_CONFIG = {
    "model_list": [
        {"model_name": "NAME", "litellm_params": {"model": "lm_studio/NAME", "api_base": "http://127.0.0.1:9/v1"}}
    ],
    "litellm_settings": {"callbacks": ["NAME"]},
}
_LINES = {
    "doctor": ["doctor", "--config", "CONFIG"],
    "doctor, JSON": ["doctor", "--json", "--config", "CONFIG"],
    "doctor without a file": ["doctor", "--config", "NAME"],
    "count": ["count", "--model", "NAME", "--api-base", "http://127.0.0.1:9", "REQUEST"],
    "count, JSON": ["count", "--json", "--model", "NAME", "--api-base", "http://127.0.0.1:9", "REQUEST"],
    "count without a file": ["count", "--model", "NAME", "NAME"],
    "compact": ["compact", "--dry-run", "--model", "NAME", "--window", "4096", "REQUEST"],
    "compact with a server": [
        "compact",
        "--model",
        "NAME",
        "--window",
        "1024",
        "--api-base",
        "http://127.0.0.1:9",
        "LONG",
    ],
    "up": ["up", "--config", "NAME"],
}


@pytest.mark.parametrize("line", _LINES)
@pytest.mark.parametrize("name", ["\x1b[31mqwen", "\x9b31mqwen\u202e", "qwen\x08\r"])
def test_no_command_writes_what_commands_a_terminal(
    line: str, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of models and files, and what servers and errors say: on both outputs of every command."""
    long = [{"role": "user" if number % 2 == 0 else "assistant", "content": f"{name} " * 99} for number in range(9)]
    files = {"REQUEST": _REQUEST, "LONG": json.dumps({"messages": long}), "CONFIG": json.dumps(_CONFIG)}
    for file, text in files.items():
        (tmp_path / file).write_text(text.replace("NAME", json.dumps(name)[1:-1]))
    monkeypatch.setenv("LITELLM_COMPACTION_HOME", str(tmp_path / "home"))
    main([str(tmp_path / part) if part in files else part.replace("NAME", name) for part in _LINES[line]])
    written = "".join(capfd.readouterr())
    assert written
    assert [char for char in written if not char.isprintable() and char != "\n"] == []


async def test_signing_out_ends_the_session_on_the_server() -> None:
    """For every worker, until the cookie is over by itself; other sessions of the key go on."""
    store = MemoryStore(ttl_s=60, max_bytes=1 << 20)
    ours, another_worker = SignedOut(store), SignedOut(store)
    sessions = Sessions("sk-master")
    cookie, other = sessions.seal("sk-anna"), sessions.seal("sk-anna")
    await ours.add(cookie)
    assert await another_worker.has(cookie)
    assert not await another_worker.has(other)
    for number in range(1500):
        await another_worker.add(f"cookie {number}", now_s=1000.0)
    assert len(await ours._known()) <= 1001


_DAY_S = 86_400.0


async def test_a_clock_that_jumps_lets_nobody_in() -> None:
    """A day on and back again: a session that was ended stays so; one of the future is not read, and hurts nobody."""
    signed_out, sessions = SignedOut(MemoryStore(ttl_s=7 * _DAY_S, max_bytes=1 << 20)), Sessions("sk-master")
    cookie = sessions.seal("sk-anna", 1000.0)
    await signed_out.add(cookie, now_s=1000.0)
    await signed_out.add("another", now_s=1000.0 + _DAY_S)
    assert sessions.open(cookie, 1001.0) == "sk-anna"
    assert await signed_out.has(cookie)
    for number in range(1500):
        await signed_out.add(f"cookie {number}", now_s=1000.0 + _DAY_S)
    await signed_out.add("after the clock was set back", now_s=1000.0)
    assert await signed_out.has("after the clock was set back")
    assert sessions.open(sessions.seal("sk-anna", 1000.0 + _DAY_S), 1000.0) is None
    assert sessions.open(cookie, 1000.0 + _DAY_S) is None


_COOKIES = {
    "60 kB": f"{COOKIE}=" + "x" * 60_000,
    "twice": f"{COOKIE}=a; {COOKIE}=b",
    "a thousand": "; ".join(f"{COOKIE}=x{number}" for number in range(1000)),
    "empty": f"{COOKIE}=",
    "no name": "=x",
    "quotes": f'{COOKIE}="\\"; path=/',
    "controls": f"{COOKIE}=\x7f",
    "Latin-1": f"{COOKIE}=\xe4\xff",
    "a key": f"{COOKIE}=sk-anna",
    "a session of another proxy": f"{COOKIE}={Sessions('sk-other').seal('sk-anna')}",
}


@pytest.mark.parametrize("cookie", _COOKIES)
async def test_odd_cookies_show_the_form(cookie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's session is found in them, and nothing fails over them."""
    keys: list[str | None] = []

    async def nobody(request: Request, key: str | None) -> Visitor | None:
        keys.append(key)

    monkeypatch.setattr(routes, "visitor_of", nobody)
    served = routes._Page(SimpleNamespace(store=MemoryStore(ttl_s=60, max_bytes=1 << 20)))  # type: ignore[arg-type]
    app = FastAPI()
    app.add_api_route("/", served.get, methods=["GET"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://proxy.example") as client:
        answer = await client.get("/", headers=[(b"cookie", _COOKIES[cookie].encode("latin-1"))])
    assert answer.status_code == 401
    assert set(keys) <= {None}


# (method, headers, whether a browser's cookie counts): what other sites can make a browser send.
_SENT: dict[str, tuple[str, dict[str, str], bool]] = {
    "the page itself": ("POST", {"host": "proxy.example", "origin": "http://proxy.example"}, True),
    "another origin": ("POST", {"host": "proxy.example", "origin": "https://evil.example"}, False),
    "another port": ("POST", {"host": "proxy.example:4000", "origin": "http://proxy.example:5000"}, False),
    "another origin reads": ("GET", {"host": "proxy.example", "origin": "https://evil.example"}, False),
    "a frame's origin": ("POST", {"host": "proxy.example", "origin": "null"}, False),
    "a script of another site": ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}, False),
    "a form of another site": ("POST", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, False),
    "another name of this address, told by the page": ("POST", {"host": "x", "origin": "http://proxy.example"}, False),
}


@pytest.mark.parametrize("sent", _SENT)
def test_a_browsers_cookie_counts_for_the_pages_own_requests(sent: str) -> None:
    """LiteLLM's CORS settings let any origin read an answer, so no other origin gets one."""
    method, headers, counts = _SENT[sent]
    assert is_own_request(method, headers) == counts


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "PATCH"])
async def test_the_page_itself_allows_no_other_origin(method: str) -> None:
    """A preflight finds no route of ours; what answers it on a proxy is LiteLLM's own CORS."""
    served = routes._Page(SimpleNamespace(store=MemoryStore(ttl_s=60, max_bytes=1 << 20)))  # type: ignore[arg-type]
    app = FastAPI()
    app.add_api_route("/", served.get, methods=["GET"])
    app.add_api_route("/", served.post, methods=["POST"])
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://proxy.example") as client:
        answer = await client.request(method, "/", headers=asked)
    assert answer.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_two_who_sign_out_at_the_same_time_are_both_out() -> None:
    """Each worker had read the list before the other wrote; a third one knows both, however many there are."""

    class Meeting(MemoryStore):
        async def get_fact(self, scope: str, key: str) -> str | None:
            found = await super().get_fact(scope, key)
            await asyncio.sleep(0)
            return found

    store = Meeting(ttl_s=7 * _DAY_S, max_bytes=1 << 20)
    await asyncio.gather(*(SignedOut(store).add(f"cookie {number}", 1e9 + number) for number in range(20)))
    third = SignedOut(store)
    assert all([await third.has(f"cookie {number}") for number in range(20)])
    for number in range(20, 1010):
        await third.add(f"cookie {number}", 1e9 + number)
    assert [await third.has(f"cookie {number}") for number in (0, 1009)] == [False, True]


async def test_no_other_key_brings_a_session_back() -> None:
    """A thousand sign-outs of a holder of some key pushed everybody else's out of what is remembered."""
    store, sessions = MemoryStore(ttl_s=7 * _DAY_S, max_bytes=1 << 20), Sessions("sk-master")
    stolen = sessions.seal("sk-alice")
    await SignedOut(store).add(stolen, owner=sessions.owner(stolen))
    other = sessions.owner(sessions.seal("sk-mallory"))
    assert len({"", other, sessions.owner(stolen), sessions.owner(sessions.seal("sk-bob"))}) == 4
    worker = SignedOut(store)
    for number in range(1500):
        await worker.add(f"cookie {number}", 5e9 + number, owner=other)
    assert await SignedOut(store).has(stolen, owner=sessions.owner(stolen))
    assert await worker.has(stolen, owner=sessions.owner(stolen))
    assert len(await worker._known()) <= 51


async def test_signing_out_without_a_store_holds_in_this_worker() -> None:
    """A store that cannot be read keeps nobody signed in."""
    store = MemoryStore(ttl_s=60, max_bytes=1 << 20)
    signed_out = SignedOut(store)
    await store.put_fact("page", "signed_out", "no json")
    await signed_out.add("cookie")
    await store.put_fact("page", "signed_out", '["neither"]')
    assert await signed_out.has("cookie")
    assert LIFETIME_S > 0


def test_wrong_keys_are_answered_ever_later_by_address() -> None:
    """The first few at once, then twice as late each time, up to a bound; other addresses are not held back."""
    now = [0.0]
    wrong = WrongKeys(lambda: now[0])
    delays = [wrong.delay_s("10.0.0.1") for _ in range(12)]
    assert delays[:3] == [0.0] * 3
    assert delays[3:6] == [0.5, 1.0, 2.0]
    assert max(delays) == delays[-1] == 5.0
    assert wrong.delay_s("10.0.0.2") == 0.0
    now[0] = 700.0
    assert wrong.delay_s("10.0.0.1") == 0.0
    for number in range(10_000):
        wrong.delay_s(str(number))
    assert len(wrong._tries) <= 4096


async def test_keys_tried_at_once_wait_for_each_other() -> None:
    """Forty wrong ones sent together gain nothing: one is looked at at a time, and most of them not at all."""
    slept: list[float] = []
    looks = [0]

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)

    async def look() -> str | None:
        looks[0] += 1
        assert looks[0] - 1 == len(slept), "before the one ahead of it was answered"
        await asyncio.sleep(0)
        return None

    wrong = WrongKeys(lambda: 0.0, sleep)
    outcomes = await asyncio.gather(*(wrong.tried("10.0.0.1", look) for _ in range(40)), return_exceptions=True)
    assert outcomes.count(None) == looks[0] == len(slept)
    assert looks[0] <= 3 + 8
    assert sorted(slept) == slept
    assert all(isinstance(outcome, TooManyTries) for outcome in outcomes if outcome is not None)
    assert not wrong._lanes


async def test_right_keys_wait_for_nothing_but_wrong_ones_of_their_address() -> None:
    """A burst of good requests is served, whatever others send; one that fails is no reason to hold up the next."""
    wrong = WrongKeys(lambda: 0.0, lambda seconds: pytest.fail("a right key was held back"))

    async def right() -> str:
        await asyncio.sleep(0)
        return "anna"

    async def broken() -> str:
        raise OSError

    for _ in range(9):
        wrong.delay_s("10.0.0.1")
    assert await asyncio.gather(*(wrong.tried("10.0.0.2", right) for _ in range(40))) == ["anna"] * 40
    assert await wrong.tried("10.0.0.1", right) == "anna"
    with pytest.raises(OSError):  # noqa: PT011 - its own
        await wrong.tried("10.0.0.2", broken)
    assert await wrong.tried("10.0.0.2", right) == "anna"


_NGINX = "10.0.0.1"
# (trusted_proxy_ranges, use_x_forwarded_for, the peer, what it forwards, whose tries they are).
_WAYS: dict[str, tuple[object, bool, str, str, str]] = {
    "no proxy is trusted": (None, False, _NGINX, "203.0.113.7", "forwarded"),
    "a header that anybody can send": (None, True, _NGINX, "203.0.113.7", "forwarded"),
    "what uvicorn has made of a header from loopback": (None, False, "10.1.2.3", "10.1.2.3", "forwarded"),
    "a trusted proxy": (["10.0.0.0/8"], False, _NGINX, "203.0.113.7", "203.0.113.7"),
    "forged by the client of a trusted proxy": (
        ["10.0.0.0/8"],
        True,
        _NGINX,
        "198.51.100.1, 203.0.113.7",
        "203.0.113.7",
    ),
    "two trusted proxies": (["10.0.0.0/8"], False, _NGINX, "203.0.113.7, 10.9.9.9", "203.0.113.7"),
    "somebody beside the trusted proxy": (["10.0.0.0/8"], True, "192.0.2.1", "203.0.113.7", "192.0.2.1"),
    "a trusted proxy that says nothing": (["10.0.0.0/8"], False, _NGINX, "", _NGINX),
    "no address": (["10.0.0.0/8"], False, _NGINX, "a\r\nb, <b>", _NGINX),
    "one of a subscriber's 2**64": (["10.0.0.0/8"], False, _NGINX, "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
    "its own, directly": (None, False, "2001:db8:1:2::9", "", "2001:db8:1:2::/64"),
    "an IPv4 address in IPv6's clothes": (None, False, "::ffff:192.0.2.1", "", "192.0.2.1"),
    "ranges that are none": ([17, "x/99"], False, _NGINX, "203.0.113.7", _NGINX),
}


@pytest.mark.parametrize("way", _WAYS)
def test_tries_are_of_whoever_sends_them(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a reverse proxy that LiteLLM is told to trust each client has its own throttle; nobody can choose one."""
    from litellm.proxy import proxy_server

    ranges, use_forwarded, peer, forwarded, whose = _WAYS[way]
    general = {"trusted_proxy_ranges": ranges, "use_x_forwarded_for": use_forwarded}
    monkeypatch.setattr(proxy_server, "general_settings", general)
    headers = [(b"x-forwarded-for", forwarded.encode())] if forwarded else []
    request = Request({"type": "http", "headers": headers, "client": (peer, 1234)})
    assert auth.address_of(request) == whose
    assert auth.address_of(Request({"type": "http", "headers": headers, "client": None})) == ""


async def test_keys_that_were_right_are_not_locked_out() -> None:
    """Whoever floods the page with wrong keys from one address holds up nobody there who has been in before."""
    stuck = asyncio.Event()

    async def sleep(seconds: float) -> None:
        await stuck.wait()

    async def right() -> str:
        return "anna"

    async def nobody() -> None:
        return None

    wrong = WrongKeys(lambda: 0.0, sleep)
    assert await wrong.tried(_NGINX, right, key="sk-anna") == "anna"
    for _ in range(3):
        wrong.delay_s(_NGINX)
    flood = [asyncio.create_task(wrong.tried(_NGINX, nobody, key=f"sk-{number}")) for number in range(40)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert await wrong.tried(_NGINX, right, key="sk-anna") == "anna"
    # Blocked since: looked at once more at once, then in turn like any other.
    looks: list[str] = []

    async def blocked() -> None:
        looks.append("blocked")

    tries = [asyncio.create_task(wrong.tried(_NGINX, blocked, key="sk-anna")) for _ in range(2)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert looks == ["blocked"]
    stuck.set()
    outcomes = await asyncio.gather(*flood, *tries, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {TooManyTries, type(None)}
    for number in range(5000):
        await wrong.tried(str(number), right, key=f"sk-{number}")
    assert len(wrong._right) <= 4096
    # Three letters of a digest may be these by chance.
    kept = repr(wrong._right)
    assert not any(f"sk-{number}" in kept for number in range(1000, 5000))


@pytest.mark.parametrize("name", ["Authorization", "X-LiteLLM-API-Key", "api-key", "x-api-key", "X-Own-Key", "form"])
async def test_wrong_keys_count_however_they_are_sent(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In any header that LiteLLM reads as well as in the form; somebody who shows none is just shown the form."""

    async def nobody(request: Request, key: str | None) -> Visitor | None:
        return None

    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(routes, "visitor_of", nobody)
    monkeypatch.setattr(auth, "_own_header", lambda: "x-own-key")
    served = routes._Page(SimpleNamespace(store=MemoryStore(ttl_s=60, max_bytes=1 << 20)))  # type: ignore[arg-type]
    served._wrong_keys = WrongKeys(lambda: 0.0, sleep)
    app = FastAPI()
    app.add_api_route("/", served.get, methods=["GET"])
    app.add_api_route("/", served.post, methods=["POST"])
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy.example") as client:
        for number in range(6):
            if name == "form":
                answer = await client.post("/", data={"do": "sign_in", "key": f"sk-{number}"})
            else:
                answer = await client.get("/", headers={name: f"Bearer sk-{number}"})
            assert answer.status_code == 401
        assert slept == [0.0, 0.0, 0.0, 0.5, 1.0, 2.0]
        assert (await client.get("/")).status_code == 401
    assert len(slept) == 6


_FORM = {"content-type": "application/x-www-form-urlencoded"}
# (method, path, headers, body, status): what an administrator's browser may be made to send.
_ODD: dict[str, tuple[str, str, dict[str, str], bytes, int]] = {
    "a body of 70 kB": ("POST", "/", _FORM, b"do=save&mode=" + b"x" * 70_000, 415),
    "200 fields": ("POST", "/", _FORM, b"&".join(b"a%d=1" % number for number in range(200)), 415),
    "JSON": ("POST", "/", {"content-type": "application/json"}, b'{"do": "save", "mode": "off"}', 415),
    "plain text, which other sites may send": ("POST", "/", {"content-type": "text/plain"}, b"do=save&mode=off", 415),
    "no type": ("POST", "/", {}, b"do=save&mode=off", 415),
    "no UTF-8": ("POST", "/", _FORM, b"do=save&mode=\xff\xfe", 415),
    "another site": ("POST", "/", {**_FORM, "origin": "https://evil.example"}, b"do=save&mode=off", 401),
    "no origin at all": ("POST", "/", {**_FORM, "origin": "null"}, b"do=save&mode=off", 401),
    "the same site": ("POST", "/", {**_FORM, "sec-fetch-site": "same-site"}, b"do=save&mode=off", 401),
    "another method": ("PUT", "/", _FORM, b"do=save&mode=off", 405),
    "deleting": ("DELETE", "/", {}, b"", 405),
    "a path": ("GET", "/../etc/passwd", {}, b"", 404),
    "a path in disguise": ("GET", "/%2e%2e%2fetc%2fpasswd", {}, b"", 404),
    "a message of the address": ("GET", "/?done=<script>alert(1)</script>&next=https://evil.example", {}, b"", 200),
}


@pytest.mark.parametrize("odd", _ODD)
async def test_an_administrators_browser_cannot_be_used(monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    """Nothing is saved by what is no form of the page's own; nothing of the address is shown, or followed."""

    async def administrator(request: Request, key: str | None) -> Visitor | None:
        return Visitor(role="proxy_admin", tenant="t", auth=None)

    monkeypatch.setattr(routes, "visitor_of", administrator)
    written: list[object] = []

    async def write(around: object, form: object, *_: object) -> str:
        written.append(form)
        return "same"

    monkeypatch.setattr(routes, "write", write)
    handler = CompactionHandler(settings_from({"store": "memory://"}))
    assert handler._live is not None
    assert handler._turns is not None
    around = Surroundings(
        live=handler._live,
        guards=handler._gate.guards,
        windows=handler._compactor.windows,
        sources=handler._compactor.sources,
        store=handler._store,
        turns=handler._turns,
        going_on=handler._compactor.going_on,
        router=Router,
    )
    served = routes._Page(around)
    app = FastAPI()
    app.add_api_route("/", served.get, methods=["GET"])
    app.add_api_route("/", served.post, methods=["POST"])
    method, path, headers, body, status = _ODD[odd]
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy.example") as client:
        answer = await client.request(method, path, headers=headers, content=body)
        assert answer.status_code == status
        assert written == []
        assert "evil" not in answer.text + answer.headers.get("location", "")
        assert "alert(1)" not in answer.text
        # What the page's own form sends arrives: the others were refused for what they are.
        assert (await client.post("/", headers=_FORM, content=b"do=save&mode=off")).status_code == 303
    assert written[-1] == {"do": "save", "mode": "off"}
    await handler._compactor.aclose()


@pytest.mark.skipif(os.name != "posix", reason="rights are POSIX's")
def test_closing_a_file_does_not_follow_a_link(tmp_path: Path) -> None:
    """What somebody has put in its place leads to a file that is not ours to change."""
    target, link, own = tmp_path / "target", tmp_path / "store-wal", tmp_path / "own"
    for path in (target, own):
        path.write_text("x")
        path.chmod(0o644)
    link.symlink_to(target)
    with pytest.raises(OSError, match="link"):
        make_private(link)
    make_private(own)
    assert (target.stat().st_mode & 0o777, own.stat().st_mode & 0o777) == (0o644, 0o600)
