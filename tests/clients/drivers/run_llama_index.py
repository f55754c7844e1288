"""LlamaIndex's agent with function calls, streamed as it is by itself."""

import asyncio
import os
import sys
from pathlib import Path

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def read_file(path: str) -> str:
    """Reads a file."""
    return Path(path).read_text(encoding="utf-8")


def write_file(path: str, content: str) -> str:
    """Writes a file."""
    Path(path).write_text(content, encoding="utf-8", newline="")
    return "written"


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
