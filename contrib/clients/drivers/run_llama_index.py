"""LlamaIndex's agent with function calls, streamed as it is by itself."""

import asyncio
import os
import sys

from file_tools import read_file, write_file
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


async def main() -> None:
    model = OpenAILike(
        model=os.environ["MODEL"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=1_000_000,
        timeout=200,
    )
    agent = FunctionAgent(tools=[read_file, write_file], llm=model, timeout=250)
    print(await agent.run(sys.stdin.read(), max_iterations=100))


asyncio.run(main())
