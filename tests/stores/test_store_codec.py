"""A compaction as bytes: nothing is lost, and what cannot be read is no error."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.forms import Form
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
    assert digest(known) == digest(replace(known, state="ready")) == digest(replace(known, state="read"))
    others = [compaction("g"), replace(known, ledger="- src/b.py"), replace(known, forms=(Form(1, "words"),))]
    assert len({digest(each) for each in (known, *others)}) == 4
    # As it was written down once: a receipt of then is checked with it.
    assert digest(known) == "643a1f3ed2e153c9840e357c0051a192e3986a31b584456dd86f15ff8a39c6e4"


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
