"""Threat: text that makes us work. Every pattern, and every walk over a conversation, takes linear time on any text."""

from __future__ import annotations

import pytest

from tests.security.bounded import in_child

# Seconds of one look: what other threads, and the event loop, have to wait for. Seconds for 1 MB, in a thread.
# Both with room for a machine that runs other work.
_MOST_LOOK_S, _MOST_WHOLE_S = 0.5, 60.0
# Processor clocks of virtual machines step by up to 20 ms: a shorter time says nothing of growth.
_LEAST_TOLD_S = 0.02
_MOST_GROWTH = 8.0


def test_every_pattern_of_the_package_takes_linear_time_on_hostile_text() -> None:
    """1 MB made of a pattern's own parts, for each of them: four times the text takes about four times as long."""
    code = "from tests.security.patterns import report; print(json.dumps(report()))"
    rows = in_child(code, {}, cpu_s=180)
    assert len(rows) > 60, "the package's patterns are not found any more"
    for name, row in rows.items():
        grows = row["long_s"] > _MOST_GROWTH * max(row["short_s"], _LEAST_TOLD_S)
        assert not grows, f"{name} is worse than linear: {row}"
        assert row["look_s"] < _MOST_LOOK_S, f"{name} holds up everybody: {row}"
        assert row["whole_s"] < _MOST_WHOLE_S, f"{name} is too slow: {row}"


# (text of an assistant's message, of a summary and of a partial answer): a head, a unit and how often.
_REASONING = {
    "openings without an end (froze the proxy for 13 s)": "<think>" * 140_000,
    "long openings": "<thinking>" * 100_000,
    "openings, one end": "<think>" * 140_000 + "</think>",
    "ends without an opening": "</think>" * 125_000,
    "pairs": "<think></think>" * 66_000,
    "halves": "<think" * 160_000,
    "nested": "<think>" * 70_000 + "</think>" * 60_000,
    "lines": "\n<think>" * 125_000,
    "fenced lines (0.8 s for 20 KB)": "```\n<think>\n" * 80_000,
    "open fences": "```x\n" * 200_000 + "<think>\n" * 10,
    "marks": "`" * 1_000_000,
    "space behind an end": "<think></think>" + " " * 1_000_000 + "x",
    "upper case": "<THINK>" * 140_000,
}
_WALKS = """
import time
from litellm_compaction.core import anchors, chain, edits, enclosures, excerpts, messages, prompts, records
from litellm_compaction.core import secrets, supersession
def tokens(text): return len(text) // 4
def message(role, text): return messages.parse_message({"role": role, "content": text})
def record(text): return records.read_record(message("user", "## Session Summary" + text))
def ledger(role):
    return lambda text: anchors.ledger(
        [message(role, text)], budget_tokens=2_000, words_tokens=500, count=tokens, newer=[message("user", "x")])
walks = {
    "summary": prompts.read_summary,
    "edited": lambda text: edits.edited([message("assistant", text)], ()),
    "open_think": enclosures.open_think,
    "open_fence": enclosures.open_fence,
    "defused": prompts.defused,
    "chain": lambda text: chain.chain([message("assistant", text)]),
    "notices": messages.without_notices,
    "record": record,
    "refusal": prompts.is_refusal,
    "user's ledger": ledger("user"),
    "result's ledger": ledger("tool"),
    "assistant's ledger": ledger("assistant"),
    "values": lambda text: supersession.marked(text, {"x": "1"}),
    "rendered": lambda text: prompts.render_message(message("tool", text)),
    "redacted": secrets.redacted,
    "excerpt": lambda text: excerpts.excerpt(text, 500, tokens),
}
found = {}
for name, text in given.items():
    for walk, run in walks.items():
        begun_s = time.process_time()
        run(text)
        found[f"{walk} of {name}"] = time.process_time() - begun_s
print(json.dumps(found))
"""
_ODD_TEXTS = {
    "spaces": " " * 1_000_000,
    "line breaks": "\n" * 1_000_000,
    "words": "ab " * 333_000,
    "one word": "a" * 1_000_000,
    "digits": "1" * 1_000_000,
    "values": "a=1 " * 250_000,
    "equals": "=" * 1_000_000,
    "Chinese values": "成" * 1_000_000,
    "named Chinese values": "端口是8" * 250_000,
    "slashes": "/" * 1_000_000,
    "paths": "a/b.py:1 " * 110_000,
    "control tokens": "<|im_start|>" * 80_000,
    "halves of control tokens": "<|" * 500_000,
    "notices": "⚙️ Compacting conversation history...\n" * 25_000,
    "error names": ".Error" * 160_000,
    "underscores": "_" * 1_000_000,
    "emoji": "👩‍👩‍👧" * 200_000,
    "surrogates": "\ud83d" * 1_000_000,
    "zero width": "\u200b" * 1_000_000,
    "combining": "e" + "\u0301" * 1_000_000,
    "backquotes": "`a" * 500_000,
    "records": "\n## Session Summary (round 1)\n[BEGIN RECORD OF EARLIER CONVERSATION]" * 14_000,
}


@pytest.mark.parametrize("texts", [_REASONING, _ODD_TEXTS], ids=["reasoning", "odd"])
def test_every_walk_over_a_conversation_is_linear(texts: dict[str, str]) -> None:
    """1 MB of each text takes under 15 s of processor time in each function; quadratic work would take hours."""
    for name, seconds in in_child(_WALKS, texts, cpu_s=240).items():
        assert seconds < 15, f"{name}: {seconds} s for 1 MB"
