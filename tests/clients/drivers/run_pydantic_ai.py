"""An agent of pydantic-ai whose answer is streamed; the first text that comes ends the run."""

import asyncio
import os
import sys
from pathlib import Path

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.usage import UsageLimits

agent = Agent(OpenAIChatModel(os.environ["MODEL"]))


@agent.tool_plain
def read_file(path: str) -> str:
    """Reads a file."""
    return Path(path).read_text(encoding="utf-8")


@agent.tool_plain
def write_file(path: str, content: str) -> str:
    """Writes a file."""
    Path(path).write_text(content, encoding="utf-8", newline="")
    return "written"


async def main() -> None:
    async with agent.run_stream(sys.stdin.read(), usage_limits=UsageLimits(request_limit=100)) as result:
        print(await result.get_output())


asyncio.run(main())
