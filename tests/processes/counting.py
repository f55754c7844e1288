"""Four long answers that share one context: a model that counts, and what its requests could have come to together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf

from tests.integration.bench import SUMMARY, is_summary_call
from tests.lmstudio_double import ChatCall, Reply, RequestRecord

TAGS = ("alpha", "beta", "gamma", "delta")
_WORDS = 600


def words(tag: str) -> list[str]:
    return [f"{tag}{number}" for number in range(1, _WORDS + 1)]


def counting(call: ChatCall) -> Reply:
    """Counts in the client's own words, and goes on after the last word that it sees."""
    if is_summary_call(call.body):
        return Reply(SUMMARY)
    tag = re.findall(r"count (\w+)", call.sent_text)[0]
    done = re.findall(rf"{tag}(\d+)", call.sent_text)
    return Reply(" ".join(words(tag)[int(done[-1]) if done else 0 :]))


def held_tokens(records: Sequence[RequestRecord], at_s: float) -> int:
    """What the prompts and bounds of all that ran at a time could have come to together."""
    running = [each for each in records if each.started_s <= at_s < (each.ended_s or inf)]
    return sum(each.prompt_tokens + (each.body or {})["max_tokens"] for each in running)
