"""Who pays for what, and who sees whose: rows of a second callback, and tenants that never meet (promise P9)."""

from __future__ import annotations

import json

from tests.builders import ONE_ROUND, answered, talk
from tests.integration.bench import Bench, answers
from tests.integration.rows import Rows
from tests.lmstudio_double import Fault, Reply

_CANARY = "YELLOW-CANARY-0815"


def test_one_row_per_call_all_paid_by_the_same_key(routes: Bench, rows: Rows) -> None:
    """A compacted request leaves one row for the client's call and one for the summary, of the same key and people."""
    watch, key = routes.watch("local"), "sk-anna.paying"
    messages = talk("paying", ONE_ROUND)
    answer = routes.proxy.by(key).chat("local", messages, user="customer-1", stream=True)
    assert answer.headers["x-litellm-compaction"] == "compacted"
    assert len(rows.of(key, 2)) == 2
    # A row too many would come before that of the next request.
    routes.proxy.by(key).chat("local", messages[:3])
    found = rows.of(key, 3)[:-1]
    assert len(watch.summaries) == 1
    assert [row["event"] for row in found] == ["success"] * 2
    # LiteLLM would file a pinned call under 64 hex digits, in its metrics and every callback.
    assert [row["model_group"] for row in found] == ["local"] * 2
    assert sorted("litellm-compaction" in (row["tags"] or ()) for row in found) == [False, True]
    assert len({row["call_id"] for row in found}) == 2
    assert len({json.dumps(row["identity"]) for row in found}) == 1
    identity = found[0]["identity"]
    assert (identity["user_id"], identity["team_id"], identity["end_user_id"]) == ("anna", "red", "customer-1")
    assert identity["hash"]
    assert sorted(row["prompt_tokens"] for row in found) == sorted(
        record.prompt_tokens for record in [watch.chats[0], *watch.summaries]
    )


def test_warm_up_is_paid_by_the_client_who_needed_it(routes: Bench, rows: Rows) -> None:
    """The one-token request that loads a model has its own row, of the same key."""
    routes.watch("warmed")
    assert routes.proxy.by("sk-bert.cold").chat("warmed", talk("cold", 300)).status_code == 200
    found = rows.of("sk-bert.cold", 2)
    assert [row["identity"]["user_id"] for row in found] == ["bert", "bert"]
    assert [row["identity"]["team_id"] for row in found] == ["blue", "blue"]
    assert found[0]["max_tokens"] == 1


def test_nothing_of_the_conversation_and_nothing_of_ours_is_in_metadata(routes: Bench, rows: Rows) -> None:
    """Other callbacks find neither conversation text nor our bookkeeping in metadata, and no budget reservation."""
    routes.watch("local", answers(Reply(_CANARY), Reply(fault=Fault("500"))))
    key = "sk-anna.canary"
    routes.proxy.by(key).chat("local", talk(_CANARY, 8000))
    routes.watch("local", answers(Reply(_CANARY)))
    routes.proxy.by(key).chat("local", answered(talk(_CANARY, 8000), _CANARY, "Go on."), stream=True)
    found = rows.of(key, 3)
    assert len(found) >= 3
    for row in found:
        assert _CANARY not in row["metadata"]
        # `autorouter_compaction` is LiteLLM's own name for the origin of such calls; the other is our tag on them.
        told = row["metadata"].replace("autorouter_compaction", "").replace("['litellm-compaction']", "")
        assert "compaction" not in told
