"""A compaction as bytes: nothing is lost, and what cannot be read is no error."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.compaction import Compaction, Shown
from litellm_compaction.stores.store import decode, digest, encode
from tests.stores.compactions import compaction, compactions


@given(compactions())
def test_everything_survives(known: Compaction) -> None:
    """Equal in every field, whatever the texts hold, and so in the text that the model gets."""
    read = decode(encode(known))
    assert read == known
    assert read is not None
    assert read.record == known.record


def test_a_digest_is_of_the_contents() -> None:
    """It changes with any word, and not when a record that was written ahead is put into effect."""
    known = compaction("h")
    assert digest(known) == digest(replace(known, ahead=True)) == digest(replace(known, early=True))
    others = [compaction("g"), replace(known, ledger="- src/b.py"), replace(known, shown=(Shown(1, "stub"),))]
    assert len({digest(each) for each in (known, *others)}) == 4
    # As it was written down on 2026-11-27: a receipt of then is checked with it.
    assert digest(known) == "0305459678a431801ea2a617769d6e37a57b1038788f8ba6d11d82d8b031650c"


@given(st.binary() | st.text().map(str.encode))
def test_what_is_not_ours_is_none(data: bytes) -> None:
    """Any bytes: no error."""
    assert decode(data) is None


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"compaction": None}, {"compaction": {}}, {"compaction": {"level": "magic"}}],
)
def test_what_this_version_cannot_apply_is_none(change: dict[str, object]) -> None:
    """Another envelope, missing fields, an unknown level."""
    envelope = json.loads(encode(compaction("h")))
    inner = change.get("compaction")
    if isinstance(inner, dict) and inner:
        change = {"compaction": {**envelope["compaction"], **inner}}
    assert decode(json.dumps({**envelope, **change}).encode()) is None
