"""Threat: the page, the terminal and the log as ways in, or as places where strangers' text acts (issue 12)."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from litellm_compaction.data_folder import make_private
from litellm_compaction.events import HarmlessRecords, harmless
from litellm_compaction.proxy.pages.sessions import LIFETIME_S, Sessions, SignedOut, WrongKeys
from litellm_compaction.stores import MemoryStore

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
