"""A model as the library has it: a name and a function; to the engine it is a target without a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from litellm_compaction.config import Settings
from litellm_compaction.core.messages import Message, parse_message
from litellm_compaction.engine.context import Attempts, PruningModel, RequestContext, nothing
from litellm_compaction.errors import CompactionError, SummaryFailed
from litellm_compaction.summarizer import SummaryAnswer
from litellm_compaction.windows.windows import Target

# Called with `model=, messages=, max_tokens=, temperature=`; answers as OpenAI's chat completions, object or dict:
# `litellm.acompletion`, `AsyncOpenAI().chat.completions.create`, or a function of the caller's.
Completion: TypeAlias = Callable[..., Awaitable[Any]]

_TEMPERATURE = 0.3
# A pruning, and the summary that is made if it does not do.
_MOST_JOBS = 2


@dataclass(frozen=True, slots=True)
class Model:
    """A model by its name, which says how tokens are counted, and the function that asks it for summaries."""

    name: str
    complete: Completion = field(repr=False)

    def context(self, window_tokens: int, settings: Settings) -> RequestContext:
        """The surroundings of a request; without an address no server is asked."""
        name = self.name
        target = Target(
            key=name, model=name, api_base=None, api_key=None, context_length=window_tokens, is_lmstudio=False
        )
        return RequestContext(
            label=name,
            target=target,
            settings=settings,
            scope="",
            # Asked about the conversation as text: its server's cache is not known.
            pruning_models=(PruningModel(label=name, target=target, ask=self.ask, is_same=False),),
            warm_up=nothing,
            attempts=Attempts(summary_calls_left=min(_MOST_JOBS, settings.constants.max_summary_calls)),
        )

    async def ask(self, messages: Sequence[Message], *, max_tokens: int, **_: object) -> SummaryAnswer:
        """One call of the function, as the engine asks a pruning model; any failure is a `SummaryFailed`."""
        raw = [dict(message.raw) for message in messages]
        try:
            said = await self.complete(model=self.name, messages=raw, max_tokens=max_tokens, temperature=_TEMPERATURE)
            choice = (said if isinstance(said, Mapping) else said.model_dump())["choices"][0]
            message = choice["message"]
            return SummaryAnswer(
                text=parse_message({"role": "assistant", "content": message.get("content")}).text,
                reasoning=str(message.get("reasoning_content") or ""),
                finish_reason=choice.get("finish_reason") or "stop",
                calls_tool=bool(message.get("tool_calls")),
            )
        except CompactionError:
            raise
        except Exception as error:
            raise SummaryFailed("error", f"the summariser raised {type(error).__name__}") from error
