"""An agent loop of the anthropic library, streamed."""

import os
import sys
from pathlib import Path

from anthropic import Anthropic

TEXT = {"type": "string"}
TOOLS = [
    {
        "name": name,
        "description": f"{name} in the working folder",
        "input_schema": {"type": "object", "properties": properties, "required": [*properties]},
    }
    for name, properties in (("read_file", {"path": TEXT}), ("write_file", {"path": TEXT, "content": TEXT}))
]


def call(name: str, given: dict[str, str]) -> str:
    if name == "read_file":
        return Path(given["path"]).read_text(encoding="utf-8")
    Path(given["path"]).write_text(given["content"], encoding="utf-8", newline="")
    return "written"


messages = [{"role": "user", "content": sys.stdin.read()}]
client = Anthropic()
while True:
    with client.messages.stream(model=os.environ["MODEL"], max_tokens=8000, messages=messages, tools=TOOLS) as stream:
        message = stream.get_final_message()
    messages.append({"role": "assistant", "content": message.content})
    uses = [block for block in message.content if block.type == "tool_use"]
    if not uses:
        break
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": call(use.name, use.input)} for use in uses]
    messages.append({"role": "user", "content": results})
print("".join(block.text for block in message.content if block.type == "text"))
