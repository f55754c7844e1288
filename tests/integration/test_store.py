"""The default store outlives the proxy: what one process has summarized, the next one reuses."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from litellm_compaction.simulator import Model, Simulator, serve
from tests.integration.bench import KEY, SUMMARY, answers, is_summary_call
from tests.integration.conversations import ONE_ROUND, talk
from tests.integration.harness import CHAT, environment, lm_studio, proxy, write_config

pytestmark = pytest.mark.proxy


def test_a_second_proxy_reuses_what_the_first_has_made(tmp_path: Path) -> None:
    """No summary call and the same bytes upstream; the file is the user's alone, and the history has both."""
    simulator = Simulator([Model(KEY, publisher="zai-org", architecture="glm4")])
    simulator.script = answers()
    simulator.load(KEY, 8192)
    messages = talk("a store that stays", ONE_ROUND)
    sent: list[object] = []
    actions: list[str] = []
    summaries: list[int] = []
    with serve(simulator) as address:
        config = write_config(tmp_path, [lm_studio("local", KEY, address.base_url)], {})
        for _ in range(2):
            since = len(simulator.requests)
            with proxy(config) as running:
                actions.append(running.chat("local", messages).headers["x-litellm-compaction"])
            chats = [record for record in simulator.requests[since:] if record.path == CHAT]
            summaries.append(sum(is_summary_call(record.body) for record in chats))
            sent.append((chats[-1].body or {})["messages"])
    assert actions == ["compacted", "reused"]
    assert summaries == [1, 0]
    assert sent[0] == sent[1]
    assert SUMMARY in str(sent[1]).replace("\\n", "\n")
    # Uvicorn ends itself by the signal that it got, so nothing is closed, and nothing is lost.
    modes = {stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "litellm_compaction").glob("store.sqlite3*")}
    assert modes == ({0o600} if os.name == "posix" else modes)
    shown = subprocess.run(
        [sys.executable, "-m", "litellm_compaction.cli", "events"],
        env=environment(XDG_DATA_HOME=str(tmp_path)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert [line.split()[2] for line in shown.splitlines()] == ["compacted", "reused"]
    assert "store that stays" not in shown
