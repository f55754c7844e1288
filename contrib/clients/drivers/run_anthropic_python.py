"""An agent loop of the anthropic library, streamed."""

import json
import os
import sys

from anthropic import Anthropic
from file_tools import SCHEMAS, call

TOOLS = [
    {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]} for each in SCHEMAS
]
messages = [{"role": "user", "content": sys.stdin.read()}]
client = Anthropic()
while True:
    with client.messages.stream(model=os.environ["MODEL"], max_tokens=8000, messages=messages, tools=TOOLS) as stream:
        message = stream.get_final_message()
    messages.append({"role": "assistant", "content": message.content})
    uses = [block for block in message.content if block.type == "tool_use"]
    if not uses:
        break
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": call(use.name, json.dumps(use.input))} for use in uses
    ]
    messages.append({"role": "user", "content": results})
print("".join(block.text for block in message.content if block.type == "text"))
