"""LangChain's agent, a LangGraph graph, with the model that `connect` writes."""

import runpy
import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk


def read_file(path: str) -> str:
    """Reads a file."""
    return Path(path).read_text(encoding="utf-8")


def write_file(path: str, content: str) -> str:
    """Writes a file."""
    Path(path).write_text(content, encoding="utf-8", newline="")
    return "written"


connected = runpy.run_path(str(Path(__file__).with_name("connected.py")))
agent = create_agent(connected["model"], tools=[read_file, write_file])
asked = {"messages": [{"role": "user", "content": sys.stdin.read()}]}
for chunk, _ in agent.stream(asked, {"recursion_limit": 200}, stream_mode="messages"):
    if isinstance(chunk, AIMessageChunk):
        print(chunk.text, end="")
