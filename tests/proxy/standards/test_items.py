"""Compactions that a client keeps itself: encrypted text, when it goes back, and an answer without it."""

from __future__ import annotations

import base64
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.portable import Portable, portable
from litellm_compaction.errors import BadItem
from litellm_compaction.proxy.standards.orders import Items, Orders
from litellm_compaction.proxy.standards.standards import Standards
from tests.builders import image, parsed, raw_conversations, user
from tests.core.test_portable import COMPACTION, RAW
from tests.engine.bench import Bench
from tests.proxy.scripted import exchange_of

ITEMS = Items(lambda: "sk-one")
FOUND = portable(parsed(RAW), COMPACTION, spares_requests=True)


def test_it_comes_back_as_it_was() -> None:
    """The record with its rounds and quotes, the messages, images and half surrogate pairs among them."""
    found = Portable(base=FOUND.base, kept=parsed([user("\ud83d é 日本"), {"role": "user", "content": [image()]}]))
    for each in (FOUND, found, portable(parsed(RAW), None)):
        text = ITEMS.sealed("anna", each)
        assert Items(lambda: "sk-one").opened("anna", text, "input[0]") == each


@pytest.mark.parametrize(
    "how", ["tenant", "secret", "changed", "noise", "cut", "longer", "mark", "empty", "none", "list", "mac"]
)
def test_anything_else_is_refused(how: str) -> None:
    """By one clear line that names the place, and never by an exception of another kind."""
    text = ITEMS.sealed("anna", FOUND)
    items = Items(lambda: "sk-two") if how == "secret" else ITEMS
    given: object = {
        "changed": text[:60] + ("A" if text[60] != "A" else "B") + text[61:],
        "noise": f"{text[:60]}!{text[60:]}",
        "cut": text[:-8],
        "longer": text + "AAAA",
        "mark": text.removeprefix("lmc1."),
        "empty": "",
        "none": None,
        "list": [text],
        "mac": "lmc1." + base64.urlsafe_b64encode(bytes(16) + base64.urlsafe_b64decode(text[5:])[16:]).decode(),
    }.get(how, text)
    with pytest.raises(BadItem, match=r"^`input\[3\]` "):
        items.opened("bert" if how == "tenant" else "anna", given, "input[3]")


def test_a_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the proxy asks for no key, every client can write one."""
    monkeypatch.setattr("litellm_compaction.proxy.standards.orders._MOST_BYTES", 1000)
    free = Items(lambda: None)
    for body in (b"{" * 2000, b"[]", b"{}", b"\xff", b'{"base": "{}", "kept": [], "spares_requests": false}'):
        text = "lmc1." + base64.urlsafe_b64encode(zlib.compress(body)).decode()
        with pytest.raises(BadItem):
            free.opened("anna", text, "input")


@given(raw_conversations(), st.text(max_size=8))
def test_any_conversation_comes_back(raw: list[dict[str, object]], tenant: str) -> None:
    """Whatever is in it."""
    found = portable(parsed(raw), None)
    assert ITEMS.opened(tenant, ITEMS.sealed(tenant, found), "input") == found


async def test_an_answer_is_whole_without_an_item_that_cannot_be_made() -> None:
    """A fault of ours costs the client nothing but the item."""

    def broken() -> str:
        raise RuntimeError("no secret")

    bench = Bench()
    standards = Standards(bench.compactor, Items(broken))
    call = exchange_of(*RAW, orders=Orders(wants_item=True))
    call.prepared = replace(await bench.guard(RAW, 8192), applied=COMPACTION)
    assert (await standards.told(call)).text == ""
