"""Writes docs/llms.txt, the list of pages for programs that read documentation (llmstxt.org), from docs/README.md.

    python tools/llms.py

A test compares the file with the list.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_ROW = re.compile(r"^- \[(.+?)\]\((.+?\.md)\): (.+)$", re.MULTILINE)


def text() -> str:
    """Returns the file's text."""
    overview = (DOCS / "README.md").read_text(encoding="utf-8")
    title, _, rest = overview.partition("\n")
    pages = "\n".join(f"- [{name}]({path}): {what}" for name, path, what in _ROW.findall(rest))
    summary = rest.strip().partition("\n")[0]
    more = "A callback for a stock LiteLLM proxy: one line in config.yaml. Python 3.10 or newer."
    return f"{title}\n\n> {summary}\n\n{more}\n\n## Pages\n\n{pages}\n"


if __name__ == "__main__":
    (DOCS / "llms.txt").write_text(text(), encoding="utf-8")
