"""Threat: secrets that are written down. None enters a ledger, a summary or a store; names, ids and paths stay."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from litellm_compaction.core import secrets
from litellm_compaction.core.secrets import MARKER, redactor
from litellm_compaction.engine import context
from litellm_compaction.engine import make as making
from litellm_compaction.errors import SummaryFailed
from tests.builders import tool_round
from tests.engine.bench import Bench, FakeAsk
from tests.engine.test_compactor import LONG


@pytest.mark.parametrize("looked", ["where it is made", "before it is kept"])
async def test_no_secret_enters_the_ledger_of_an_edit(looked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old results make room without a model; what a ledger keeps of them is looked at twice, each by itself enough."""
    make, made = making.ledger, set[str]()

    def ledger(*given: Any, **named: Any) -> str:
        if looked == "before it is kept":
            return make(*given, **{**named, "redact": str})
        made.add(found := make(*given, **named))
        return found

    monkeypatch.setattr(making, "ledger", ledger)
    monkeypatch.setattr(
        context, "redactor", lambda patterns: lambda text: text if text in made else redactor(patterns)(text)
    )
    raw = [{"role": "user", "content": "Set the login up."}]
    for number in range(6):
        result = f"DB_PASSWORD=hunter{number}2\nwrote src/login{number}.py\n" + f"line {number} of it\n" * 120
        raw += tool_round(f"read_{number}", result, f"call-{number}")
    bench = Bench(ask=FakeAsk(SummaryFailed("empty")))
    raw += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "And?"}]
    guarded = await bench.guard(raw, 3000)
    assert guarded.action == "compacted"
    (kept,) = [compaction for _, compaction in bench.store.kept]
    assert "line" in kept.form_of.values(), "results were cleared"
    assert "src/login0.py" in kept.ledger
    assert MARKER in kept.ledger
    assert "hunter02" not in repr(kept)


def test_a_pattern_that_would_never_end_is_ended() -> None:
    """What is searched already is kept, the rest is left out: nothing is written down unsearched."""
    redact = redactor((r"(?:a|aa)+\$",))
    assert redact("ordinary words") == "ordinary words"
    text = "word " * 20_000 + "a" * 80 + "! PIN 1234"
    found = redact(text)
    assert found.endswith(secrets.TOO_SLOW)
    assert text.startswith(found.removesuffix(secrets.TOO_SLOW))
    assert "1234" not in found


async def test_of_a_pattern_that_takes_too_long_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """No word of the text, neither in the log nor in what is sent."""
    bench = Bench(ask=FakeAsk(f"## State\nThe customer is {'a' * 80}!"))
    guarded = await bench.guard([*LONG[:9], LONG[-1]], 2048, redact_patterns=[r"(?:a|aa)+\$"])
    assert guarded.action == "compacted"
    assert "aaaa" not in caplog.text
    assert all("aaaa" not in str(message.raw) for message in guarded.messages or ())


@pytest.mark.parametrize("strategy", ["summary", "prune"])
async def test_an_operators_patterns_are_searched_beside_the_event_loop(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may be slow, also where the conversation is short."""
    threads: list[int] = []
    here = threading.get_ident()

    def redactor_of(patterns: tuple[str, ...]) -> Callable[[str], str]:
        found = redactor(patterns)
        return lambda text: (threads.append(threading.get_ident()), found(text))[1]

    monkeypatch.setattr(context, "redactor", redactor_of)
    bench = Bench(ask=FakeAsk("## State\nThe customer is KD-123456, and all else is as it was in the text before."))
    short = [*LONG[:9], LONG[-1]]
    assert sum(len(str(message["content"])) for message in short) < 20_000
    guarded = await bench.guard(short, 2048, redact_patterns=[r"KD-\d{6}"], strategy=strategy)
    assert guarded.action == "compacted"
    assert threads
    assert here not in threads
