"""The agents library, streamed; the environment says which of OpenAI's APIs it speaks."""

import asyncio
import os
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
set_default_openai_api(os.environ["OPENAI_AGENTS_API"])


@function_tool
def read_file(path: str) -> str:
    """Reads a file."""
    return Path(path).read_text(encoding="utf-8")


@function_tool
def write_file(path: str, content: str) -> str:
    """Writes a file."""
    Path(path).write_text(content, encoding="utf-8", newline="")
    return "written"


async def main() -> None:
    agent = Agent(name="worker", model=os.environ["MODEL"], tools=[read_file, write_file])
    result = Runner.run_streamed(agent, sys.stdin.read(), max_turns=100)
    async for _ in result.stream_events():
        pass
    print(result.final_output)


asyncio.run(main())
