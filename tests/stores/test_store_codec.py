"""A compaction as bytes: nothing is lost, and what cannot be read is no error."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given

from litellm_compaction.core.compaction import Compaction, compaction_id
from litellm_compaction.core.forms import Form
from litellm_compaction.master_key import Box
from litellm_compaction.stores import Store
from litellm_compaction.stores.sqlite import MemoryRows
from litellm_compaction.stores.store import decode, digest, encode
from tests.stores.compactions import compaction, compactions


@given(compactions())
def test_everything_survives(known: Compaction) -> None:
    """Equal in every field, whatever the texts hold, and so in the text that the model gets."""
    read = decode(encode(known))
    assert read == known
    assert read is not None
    assert read.record == known.record


def test_bytes_name_every_field() -> None:
    """Whatever a later version takes for what is not there; text of any script is as short as it is."""
    data = encode(compaction("h", text="模型"))
    assert json.loads(data)["compaction"].keys() == {field.name for field in fields(Compaction)}
    assert "模型".encode() in data


@pytest.mark.parametrize("secret", ["sk-new", None])
async def test_records_of_another_key_are_told_once(secret: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """A look tells nothing; a request that misses them does."""
    old = Store(MemoryRows(ttl_s=100, max_bytes=10_000), Box(lambda: "sk-old", b"records"))
    new = Store(old.rows, Box(lambda: secret, b"records"))
    await old.put("team", compaction("h"))
    await old.name("owner", "team", compaction("h"))
    found = [await old.named(owner, compaction_id("team", "h")) for owner in ("owner", "other")]
    assert [each and each.compaction for each in found] == [compaction("h"), None]
    assert (await new.compactions(), len(await new.unreadable()), await old.unreadable()) == ([], 1, [])
    assert caplog.records == []
    for _ in range(2):
        assert await new.find("team", ["h"]) == []
    assert [record.getMessage().split()[0] for record in caplog.records] == ["records_unreadable"]


def test_a_digest_is_of_the_contents() -> None:
    """It changes with any word, and not when a record that was written ahead is put into effect."""
    known = compaction("h")
    assert digest(known) == digest(replace(known, state="ready")) == digest(replace(known, state="read"))
    others = [compaction("g"), replace(known, ledger="- src/b.py"), replace(known, forms=(Form(1, "words"),))]
    assert len({digest(each) for each in (known, *others)}) == 4
    # As it was written down once: a receipt of then is checked with it.
    assert digest(known) == "4fe69a347821251250f2378d7b5bc35be5c9256f80a1645a64ee76b0d58b0608"
    known = compaction("h", text="Zażółć")
    assert digest(known) == "336a5c437d28bb0cfccd1f2eac7c45063b27ef6638db5ae0c674448935963185"


MADE = json.loads(encode(compaction("h")))["compaction"]


@pytest.mark.parametrize("change", [{"version": 1}, {"compaction": None}, {"compaction": {}}])
def test_what_this_version_cannot_apply_is_none(change: dict[str, object]) -> None:
    """Another envelope, missing fields, an unknown level; bytes that nobody wrote."""
    assert decode(json.dumps({"version": 2, "compaction": MADE}).encode()) == compaction("h")
    assert decode(json.dumps({"version": 2, "compaction": MADE, **change}).encode()) is None
    assert all(decode(data) is None for data in (b"", b"\xff", b"{}", b"[" * 100_000, b"9" * 5000))
