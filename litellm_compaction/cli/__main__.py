"""`python -m litellm_compaction.cli`, the same as the console script."""

import sys

from litellm_compaction.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
