"""The command line: `litellm-compaction up`, `demo`, `doctor`."""

from litellm_compaction.cli.arguments import main

__all__ = ["main"]
