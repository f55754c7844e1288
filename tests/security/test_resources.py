"""Threat: text that makes us work. Every pattern, and every walk over a conversation, takes linear time on any text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import litellm_compaction
from litellm_compaction import errors
from litellm_compaction.core import secrets
from litellm_compaction.recall import search
from tests.recall.test_index import indexed, talk
from tests.security import patterns

pytest.importorskip("resource", reason="limits on a process need a POSIX system")

# LiteLLM's own.
pytestmark = pytest.mark.filterwarnings("ignore:.*`ReadOnly` qualifier:UserWarning")
# One look, which other threads and the event loop have to wait for, and 1 MB, in a thread: in plain searches of 1 MB,
# some 16 ms each. The slowest patterns take 34 and 139.
_MOST_LOOK, _MOST_WHOLE = 100, 1_000
# Processor clocks of virtual machines step by up to 20 ms: a shorter time says nothing of growth.
_LEAST_TOLD_S = 0.02
_MOST_GROWTH = 8.0


_ROOT = Path(__file__).resolve().parents[2]
_PREAMBLE = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({cpu_s}, {cpu_s} + 1))
resource.setrlimit(resource.RLIMIT_AS, ({memory_bytes}, {memory_bytes}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
given = json.loads(sys.stdin.read())
"""


def in_child(code: str, given: Any, *, cpu_s: int) -> Any:
    """What `code` prints as JSON; it finds `given` under that name. Fails the test where it uses more than allowed."""
    preamble = _PREAMBLE.format(cpu_s=cpu_s, memory_bytes=2 * 2**30)
    environ = {**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", preamble + code],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        env=environ,
        check=False,
        # For a child that sleeps; one that works is ended by its limit.
        timeout=600,
    )
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(done.stdout)


@pytest.mark.parametrize("each", [pytest.param(4, id="some"), pytest.param(1, id="all", marks=pytest.mark.full)])
def test_every_pattern_of_the_package_takes_linear_time_on_hostile_text(each: int) -> None:
    """1 MB made of a pattern's own parts, for each of them: four times the text takes about four times as long."""
    code = "from tests.security.patterns import report; print(json.dumps(report(**given)))"
    found = list(map(patterns.as_json, patterns.patterns(litellm_compaction)))
    assert len(found) > 60, "the package's patterns are not found any more"
    rows = in_child(code, {"given": found[::each]}, cpu_s=180)
    for name, row in rows.items():
        grows = row["long_s"] > _MOST_GROWTH * max(row["short_s"], _LEAST_TOLD_S)
        assert not grows, f"{name} is worse than linear: {row}"
        assert row["look"] < _MOST_LOOK, f"{name} holds up everybody: {row}"
        assert row["whole"] < _MOST_WHOLE, f"{name} is too slow: {row}"


# (text of an assistant's message, of a summary and of a partial answer): a head, a unit and how often.
_REASONING = {
    "openings without an end (froze the proxy for 13 s)": "<think>" * 140_000,
    "ends without an opening": "</think>" * 125_000,
    "nested": "<think>" * 70_000 + "</think>" * 60_000,
    "fenced lines (0.8 s for 20 KB)": "```\n<think>\n" * 80_000,
    "open fences": "```x\n" * 200_000 + "<think>\n" * 10,
    "marks": "`" * 1_000_000,
    "space behind an end": "<think></think>" + " " * 1_000_000 + "x",
}
_WALKS = """
import time
from litellm_compaction.core import forms, ledger, messages, portable, prompts, secrets
from litellm_compaction.core import cuts as inside
def tokens(text): return len(text) // 4
def message(role, text): return messages.parse_message({"role": role, "content": text})
def read(text): return portable.read_record([message("user", "## Session Summary" + text)])
def kept(role):
    return lambda text: ledger.ledger(
        [message(role, text)], budget_tokens=2_000, count=tokens)
walks = {
    "summary": prompts.read_summary,
    "edited": lambda text: forms.in_forms([message("assistant", text)], {}),
    "open_think": inside.open_think,
    "open_fence": inside.open_fence,
    "defused": prompts.defused,
    "chain": lambda text: messages.chain([message("assistant", text)]),
    "notices": messages.without_notices,
    "record": read,
    "user's ledger": kept("user"),
    "result's ledger": kept("tool"),
    "assistant's ledger": kept("assistant"),
    "names": ledger.named,
    "rendered": lambda text: prompts.render_message(message("tool", text)),
    "redacted": secrets.redacted,
    "excerpt": lambda text: forms.excerpt(text, 500, tokens),
}
found = {}
def seconds(run, text):
    begun_s = time.process_time()
    run(text)
    return time.process_time() - begun_s
for name, text in given["texts"].items():
    for walk, run in walks.items():
        # Where even quadratic work would not reach the limit with the whole, the whole is not tried: an eighth, both
        # ends of it, costs a 64th of it then; nor where a 32nd, as far from the eighth, tells that it is linear.
        def ends(parts):
            end_chars = len(text) // (2 * parts)
            return seconds(run, text[:end_chars] + text[-end_chars:])
        eighth_s = ends(8)
        most_s = 64 * eighth_s
        if most_s >= given["limit_s"]:
            most_s = 8 * eighth_s if eighth_s < given["most_growth"] * ends(32) else seconds(run, text)
        found[f"{walk} of {name}"] = most_s
print(json.dumps(found))
"""
_ODD_TEXTS = {
    "spaces": " " * 1_000_000,
    "line breaks": "\n" * 1_000_000,
    "words": "ab " * 333_000,
    "values": "a=1 " * 250_000,
    "named Chinese values": "端口是8" * 250_000,
    "slashes": "/" * 1_000_000,
    "paths": "a/b.py:1 " * 110_000,
    "control tokens": "<|im_start|>" * 80_000,
    "notices": "⚙️ Compacting conversation history...\n" * 25_000,
    "error names": ".Error" * 160_000,
    "emoji": "👩‍👩‍👧" * 200_000,
    "surrogates": "\ud83d" * 1_000_000,
    "combining": "e" + "\u0301" * 1_000_000,
    "backquotes": "`a" * 500_000,
    "records": "\n## Session Summary (round 1)\n[BEGIN RECORD OF EARLIER CONVERSATION]" * 14_000,
}


@pytest.mark.parametrize("texts", [_REASONING, _ODD_TEXTS], ids=["reasoning", "odd"])
def test_every_walk_over_a_conversation_is_linear(texts: dict[str, str]) -> None:
    """1 MB of each text takes under 15 s of processor time in each function; quadratic work would take hours."""
    limit_s = 15
    given = {"texts": texts, "limit_s": limit_s, "most_growth": _MOST_GROWTH}
    for name, seconds in in_child(_WALKS, given, cpu_s=240).items():
        assert seconds < limit_s, f"{name}: {seconds} s for 1 MB"


@pytest.mark.parametrize("said", ["exceeded ", "context size has been ", "成 exceeded", "x"])
def test_an_error_is_compared_quickly_with_what_the_client_said(said: str) -> None:
    """Whether a server quotes its client: taking 50 MB apart for that would hold everybody up."""
    overflow = "the context size has been exceeded"
    begun_s = time.process_time()
    assert errors.overflow_from_text(overflow, said * 1_000_000) is not None
    assert time.process_time() - begun_s < 5
    for text in (overflow.upper(), overflow.replace(" ", '\\" - \\"'), f"{'exceeded ' * 99}{overflow}"):
        assert errors.overflow_from_text(overflow, f"{'x ' * 9999}{text}{' y' * 9999}") is None
    assert errors.overflow_from_text(overflow, f"{'x ' * 9999} the size has been exceeded") is not None


def test_secrets_are_looked_for_in_slices() -> None:
    """Looking for 80 words in 50 MB took 2.9 s; one that lies across two slices is found all the same."""
    key = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEow" * 50 + "\n-----END RSA PRIVATE KEY-----"
    for edge in (32_768, 65_536):
        for shift in range(0, 40, 3):
            text = "x" * (edge - shift) + key + " ghp_" + "a1B2" * 9 + " " + "y" * 40_000
            assert "MIIEow" not in secrets.redacted(text)
            assert "a1B2" not in secrets.redacted("x " * ((edge - shift) // 2) + " ghp_" + "a1B2" * 9 + " y" * 40_000)


_QUERIES = {
    "one letter": "x",
    "two letters": "ab",
    "words": "walrus ",
    "an id": "x9_y",
    "ids": "x9_y ",
    "umlauts": "ä",
    "Chinese": "成文字",
    "letters that are two without their case": "ŉ",
    "signs": "=>",
}


@pytest.mark.parametrize("part", _QUERIES.values(), ids=_QUERIES.keys())
def test_a_query_that_nothing_answers_takes_time_in_proportion_to_its_length(part: str) -> None:
    """Twice the query takes about twice as long, with the limit of time that is in use."""
    index = indexed(*talk(["abc " * 2_000, "ABC ẞa " * 2_000]))

    def seconds(chars: int) -> float:
        begun_s = time.thread_time()
        assert not search(index, (part * chars)[:chars]).hits
        return time.thread_time() - begun_s

    seconds(8)
    short_s, long_s = seconds(1_900), seconds(3_800)
    assert long_s < 3 * max(short_s, _LEAST_TOLD_S)
