"""How a model is told not to think before it answers, where words in its prompt do that.

Asked for summaries and prunings, where thinking only costs time. LM Studio 0.4 takes `reasoning_effort` on
`/v1/chat/completions` and does nothing with it (its bug tracker: 988, 1990, 2413): only a model's own switch is left.
"""

from __future__ import annotations

import re

# Qwen 3's first models (model card of Qwen3-8B, "soft switches"); those of 2507 and later think always or never.
_SWITCHES = ((re.compile(r"(?:^|/)(?:qwen-)?qwen-?3-\d(?!.*(?:2507|think|instruct|coder))"), "/no_think"),)


def no_thinking_switch(model: str) -> str:
    """What has to stand at the end of a user message; "" for a model that has no such switch, or does not think.

    Args:
        model: as LM Studio names it, with its publisher or without.
    """
    name = model.casefold().replace("_", "-")
    return next((switch for pattern, switch in _SWITCHES if pattern.search(name)), "")
