"""Threat: foreign bytes. Every reader refuses them in its own words, in under a second of processor time each."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from litellm_compaction.config import deployment_settings_from, settings_from
from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.messages import parse_message
from litellm_compaction.core.records import read_record
from litellm_compaction.core.secrets import redacted
from litellm_compaction.errors import ConfigError, UnusableModelFile, overflow_from_text
from litellm_compaction.models.gguf import read_gguf
from litellm_compaction.models.template_filters import TemplateRefusal
from litellm_compaction.models.templates import Template
from litellm_compaction.models.tokenizer_json import read_tokenizer_json
from litellm_compaction.stores.codec import decode

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_WORDS = ("password", "=", ":", "sk-", "Bearer ", "://", "@", '"', "-----BEGIN PRIVATE KEY-----", "\n", "a1", " ", "\\")
_BLOCKS = (
    "{%",
    "%}",
    "{{",
    "}}",
    " for x in messages ",
    " endfor ",
    "x",
    "|",
    "tojson",
    "(",
    ")",
    "[",
    "]",
    "1",
    "*",
    "'",
)


def _bounded(call: Callable[[], object], *allowed: type[Exception]) -> object:
    begun_s = time.process_time()
    try:
        return call()
    except allowed:
        return None
    finally:
        assert time.process_time() - begun_s < 1


@given(st.binary(max_size=400) | st.builds(lambda text: text.encode("utf-8", "replace"), st.text()))
def test_rows_of_a_store(data: bytes) -> None:
    """A compaction, or none."""
    assert isinstance(_bounded(lambda: decode(data)), Compaction | None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    version=st.integers(0, 4),
    counts=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    rest=st.binary(max_size=300),
)
def test_gguf_files(tmp_path: Path, version: int, counts: tuple[int, int], rest: bytes) -> None:
    """Refused, whatever it promises of its lengths."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, *counts) + rest)
    _bounded(lambda: read_gguf(path), UnusableModelFile)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_tokenizer_files(tmp_path: Path, data: bytes) -> None:
    """Refused."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(UnusableModelFile):
        _bounded(lambda: read_tokenizer_json(path))


@given(st.lists(st.sampled_from(_BLOCKS), max_size=30).map("".join))
def test_templates(source: str) -> None:
    """Written or refused, never another error."""
    _bounded(lambda: Template(source).render([{"role": "user", "content": "x"}], []), TemplateRefusal)


@given(_JSON)
def test_settings(value: object) -> None:
    """Taken or refused with a name, never another error."""
    _bounded(lambda: settings_from(value), ConfigError)
    _bounded(lambda: deployment_settings_from(value), ConfigError)


@given(st.lists(st.sampled_from(_WORDS) | st.text(max_size=5), max_size=30).map("".join))
def test_redacting(text: str) -> None:
    """Any text, and a second time changes no more than the first left."""
    once = _bounded(lambda: redacted(text))
    assert isinstance(once, str)
    _bounded(lambda: redacted(once))


@given(st.text())
def test_errors_and_records(text: str) -> None:
    """A server's error and a client's record, of any text."""
    _bounded(lambda: overflow_from_text(text))
    _bounded(lambda: read_record(parse_message({"role": "user", "content": "## Session Summary" + text})))
