"""An agent loop that compacts its own conversation: no proxy, any model, about forty lines.

Before each step the messages are compacted if they have grown past 80 % of the window ("prepare step"); the loop goes
on with what comes back. Run it against LM Studio, with any model that calls tools:

    python examples/agent_loop.py qwen/qwen3-8b 8192 "How many Python files are there below this folder?"
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from litellm_compaction import CompactionConfig, Compactor, Model

SYSTEM = "You are an agent. Use the tools until the task is done, then answer in one sentence."
LIST_FILES = {
    "type": "function",
    "function": {
        "name": "list_files",
        "description": "The names in a folder, folders with a slash behind them.",
        "parameters": {"type": "object", "properties": {"folder": {"type": "string"}}, "required": ["folder"]},
    },
}


async def run_agent(
    task: str,
    model: Model,
    config: CompactionConfig,
    tools: Mapping[str, Callable[..., str]],
    schemas: list[dict[str, Any]],
    *,
    max_steps: int = 50,
) -> str:
    """The model's answer to a task, after as many tool calls as it needs.

    Args:
        task: what the user wants.
        model: its function is called like `litellm.acompletion`, for the steps and for the summaries.
        config: its window, and how much of the conversation stays as it is.
        tools: name → function; what it returns is the result that the model reads.
        schemas: of the tools.
        max_steps: after which the loop gives up.
    """
    compactor = Compactor(model, config)
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    for _ in range(max_steps):
        messages = await prepare_step(compactor, messages, schemas)
        response = await model.complete(model=model.name, messages=messages, tools=schemas)
        answer = response.choices[0].message
        if not answer.tool_calls:
            return str(answer.content)
        calls = [
            {"id": call.id, "type": "function", "function": {"name": name(call), "arguments": call.function.arguments}}
            for call in answer.tool_calls
        ]
        messages.append({"role": "assistant", "content": answer.content or "", "tool_calls": calls})
        for call in answer.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": called(call, tools)})
    return "I ran out of steps."


async def prepare_step(
    compactor: Compactor, messages: list[dict[str, Any]], schemas: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The messages of the next step: as they are, or with a summary in place of the older ones."""
    result = await compactor(messages, tools=schemas)
    if result.error:
        # A server would cut the prompt, or refuse it.
        raise result.error
    event = result.compaction_event
    if event:
        print(f"compacted, round {event.round}: {event.tokens_before:,} → {event.tokens_after:,} tokens")
    return [*map(dict, result.compacted_messages)]


def name(call: Any) -> str:
    """Which tool a call means."""
    return str(call.function.name)


def called(call: Any, tools: Mapping[str, Callable[..., str]]) -> str:
    """What the tool says, or what is wrong with the call: the model reads either."""
    try:
        return tools[name(call)](**json.loads(call.function.arguments))
    except (KeyError, TypeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def list_files(folder: str) -> str:
    """The tool that this example has."""
    return "\n".join(sorted(f"{path.name}{'/' if path.is_dir() else ''}" for path in Path(folder).iterdir()))


async def main(model: str, window_tokens: str, task: str) -> None:
    """Runs the agent on a model of a local LM Studio."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url="http://127.0.0.1:1234/v1", api_key="lm-studio")
    config = CompactionConfig(model_context_limit=int(window_tokens))
    writer = Model(model, client.chat.completions.create)
    print(await run_agent(task, writer, config, {"list_files": list_files}, [LIST_FILES]))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
