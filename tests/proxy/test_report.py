"""What the page says where a report has no window; `tests/cli/test_doctor.py` has the rest of a report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from litellm_compaction.errors import CompactionError, ModelNotLoaded, WindowUnknown
from litellm_compaction.proxy.page.auth import Visitor
from litellm_compaction.proxy.page.data import _state
from litellm_compaction.proxy.report import DeploymentReport
from litellm_compaction.windows.windows import Target

_TARGET = Target(key="1|m", model="m", api_base="http://10.0.0.7/v1", api_key=None, context_length=None)


@pytest.mark.parametrize(
    ("absence", "model", "said"),
    [
        (ModelNotLoaded("m"), "m", "not loaded yet"),
        (None, "m", "its server does not answer"),
        (None, "*", "of the model that is asked for"),
    ],
)
def test_a_window_that_is_not_there_is_said_in_words(absence: CompactionError | None, model: str, said: str) -> None:
    """To everybody alike."""
    report = DeploymentReport(target=replace(_TARGET, model=model), carrier="hooks", absence=absence)
    for role in ("proxy_admin", ""):
        assert _state(report, Visitor(role=role, tenant="t", auth=None)) == said


def test_why_nobody_knows_a_window_is_not_everybodys_business() -> None:
    """The error names the server; only who sees all is told."""
    report = DeploymentReport(target=_TARGET, carrier="hooks", absence=WindowUnknown("m", tried="10.0.0.7 says no"))
    assert "10.0.0.7" in _state(report, Visitor(role="proxy_admin", tenant="t", auth=None))
    assert _state(report, Visitor(role="internal_user", tenant="t", auth=None)) == "not known"
