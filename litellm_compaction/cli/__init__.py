"""The command line: `litellm-compaction up`, `demo`, `doctor`, `count`, `compact`, `events`, `store`."""

from litellm_compaction.cli.app import main

__all__ = ["main"]
