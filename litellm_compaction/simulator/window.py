"""Does a prompt fit its instance's window, and if not, which of LM Studio's reactions follows.

Asked once per request, when its turn has come.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .catalog import Instance
from .generation import Ending
from .overflow import keep_tokens, rolling_window, truncate_middle
from .records import RequestRecord
from .refusals import CRASHED, Refusal, does_not_fit, error_body, n_keep_too_long
from .rendering import Prompt
from .simulator import Simulator


class Met(NamedTuple):
    """What is left of the prompt; `ending` is set when the overflow ends the answer before it begins."""

    kept: Prompt
    ending: Ending | None = None


def meet_window(prompt: Prompt, simulator: Simulator, instance: Instance, record: RequestRecord) -> Met:
    """What the window leaves of a prompt; notes a truncation in `record`.

    A prompt as long as the window overflows too, since no token of an answer would fit.

    Raises:
        Refusal: the overflow is answered with HTTP 400.
    """
    sent_tokens, window_tokens = record.prompt_tokens, instance.context_length
    if sent_tokens < window_tokens:
        return Met(prompt)
    if simulator.overflow in ("truncate_middle", "rolling"):
        kept = _truncate(prompt, simulator, instance)
        record.truncated = True
        record.kept_tokens = math.ceil(kept.count_tokens() * instance.model.tokens_factor)
        return Met(kept)
    record.kept_tokens = 0
    message = does_not_fit(sent_tokens, window_tokens)
    if simulator.overflow == "error_400_string":
        raise n_keep_too_long(sent_tokens, window_tokens, simulator.n_keep_wording)
    if simulator.overflow == "error_400_object":
        raise Refusal(400, error_body(message, "object"), outcome="overflow")
    if simulator.overflow == "crash":
        instance.cache.clear()
        instance.fail_all(CRASHED, "error")
        return Met(prompt, Ending("error", "overflow", message=CRASHED, status=400))
    if simulator.overflow == "empty":
        return Met(prompt, Ending("empty", "overflow"))
    return Met(prompt, Ending("error", "overflow", message=message))


def _truncate(prompt: Prompt, simulator: Simulator, instance: Instance) -> Prompt:
    factor, window_tokens = instance.model.tokens_factor, instance.context_length
    raw_window_tokens = math.floor(window_tokens / factor)
    if simulator.overflow == "rolling":
        return rolling_window(prompt, raw_window_tokens)
    keep = math.ceil(keep_tokens(prompt) * factor)
    if keep >= window_tokens:
        raise n_keep_too_long(keep, window_tokens, simulator.n_keep_wording)
    return truncate_middle(prompt, raw_window_tokens)
