"""An agent of pydantic-ai whose answer is streamed; the first text that comes ends the run."""

import asyncio
import os
import sys

from file_tools import read_file, write_file
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.usage import UsageLimits

agent = Agent(OpenAIChatModel(os.environ["MODEL"]), tools=[read_file, write_file])


async def main() -> None:
    async with agent.run_stream(sys.stdin.read(), usage_limits=UsageLimits(request_limit=100)) as result:
        print(await result.get_output())


asyncio.run(main())
