"""The command line: `litellm-compaction up`, `demo`, `doctor`, `connect` and the others; `app.py` has their list."""

from litellm_compaction.cli.app import main

__all__ = ["main"]
