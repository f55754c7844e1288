"""LangChain's agent, a LangGraph graph, with the model that `connect` writes."""

import runpy
import sys
from pathlib import Path

from file_tools import read_file, write_file
from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk

connected = runpy.run_path(str(Path(__file__).with_name("connected.py")))
agent = create_agent(connected["model"], tools=[read_file, write_file])
asked = {"messages": [{"role": "user", "content": sys.stdin.read()}]}
for chunk, _ in agent.stream(asked, {"recursion_limit": 200}, stream_mode="messages"):
    if isinstance(chunk, AIMessageChunk):
        print(chunk.text, end="")
