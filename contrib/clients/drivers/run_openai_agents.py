"""The agents library, streamed; the environment says which of OpenAI's APIs it speaks."""

import asyncio
import os
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from file_tools import read_file, write_file

set_tracing_disabled(True)
set_default_openai_api(os.environ["OPENAI_AGENTS_API"])


async def main() -> None:
    agent = Agent(name="worker", model=os.environ["MODEL"], tools=[function_tool(read_file), function_tool(write_file)])
    result = Runner.run_streamed(agent, sys.stdin.read(), max_turns=100)
    async for _ in result.stream_events():
        pass
    print(result.final_output)


asyncio.run(main())
