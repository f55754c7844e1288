"""The picture of a record in the documents is of a run."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from tests.processes.record_picture import picture, run


def test_the_picture_in_the_documents_is_of_a_run(tmp_path: Path) -> None:
    """Its script draws the run that it makes: the record's words, those that stay, and both palettes."""
    made = run(tmp_path)
    drawn = picture(made)
    texts = "\n".join(ElementTree.fromstring(drawn).itertext())  # noqa: S314 - made here
    assert made.record["record"].splitlines()[0] in texts
    assert texts.count(made.before[-1]["content"]) == 2
    assert "prefers-color-scheme: dark" in drawn
    known = (Path(__file__).parents[2] / "docs" / "compaction.svg").read_text("utf-8")
    assert f"Before: {len(made.before)} messages" in known
    assert "prefers-color-scheme: dark" in known
