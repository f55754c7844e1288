"""Values that change in the course of a conversation: the newest has to be there, and to be told from the older ones.

Written apart from the rules by which the ledger marks what came later, and not to be used for tuning them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.lib.constraints import spoken
from benchmarks.lib.measuring import JsonDict, Transcript
from tests.integration.validity import searchable


class Change(NamedTuple):
    """Two sentences that give a thing two values, the second one later."""

    older: str
    newer: str
    old_value: str
    new_value: str


CHANGES = (
    Change("The staging port is 4812.", "Correction: the staging port is 4913.", "port is 4812", "4913"),
    Change("Take branch = hotfix/3377 for this.", "I was wrong, branch = hotfix/5120.", "hotfix/3377", "hotfix/5120"),
    Change("My budget is 640 euros.", "I can stretch a little: my budget is 715 euros.", "640 euros", "715 euros"),
    Change("Put the report into /srv/out_a/.", "Put the report into /srv/out_b/ after all.", "out_a", "out_b"),
    Change("Das Limit ist 38.", "Neuer Stand: das Limit ist 52.", "Limit ist 38", "Limit ist 52"),
    Change("超时时间是45秒。", "超时时间改为90秒。", "45秒", "90秒"),
)


def changing(transcript: Transcript, change: Change) -> Transcript | None:
    """The conversation in which the user says both, early and before its middle; None where there is no place."""
    once = spoken(transcript, 0.1, change.older)
    twice = once and spoken(once, 0.4, change.newer)
    facts: list[JsonDict] = [{"text": change.older, "msg": 0}, {"text": change.newer, "msg": 0}]
    return twice and replace(twice, facts=facts)


def is_clear(change: Change, upstream: Sequence[JsonDict]) -> bool:
    """Whether the newest value is there, and behind each mention of the older one, in its line or further down."""
    shown = searchable(upstream)
    newest_at = shown.rfind(change.new_value)
    older_at = shown.rfind(change.old_value)
    if newest_at >= 0 and older_at > newest_at:
        line_end = shown.find("\n", older_at)
        return change.new_value in shown[older_at : line_end if line_end >= 0 else len(shown)]
    return newest_at >= 0
