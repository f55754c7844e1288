"""An agent loop of LiteLLM's library, streamed and put together by its own builder."""

import json
import os
import sys
from pathlib import Path

import litellm

TEXT = {"type": "string"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} in the working folder",
            "parameters": {"type": "object", "properties": properties, "required": [*properties]},
        },
    }
    for name, properties in (("read_file", {"path": TEXT}), ("write_file", {"path": TEXT, "content": TEXT}))
]


def call(name: str, arguments: str) -> str:
    given = json.loads(arguments)
    if name == "read_file":
        return Path(given["path"]).read_text(encoding="utf-8")
    Path(given["path"]).write_text(given["content"], encoding="utf-8", newline="")
    return "written"


messages = [{"role": "user", "content": sys.stdin.read()}]
while True:
    stream = litellm.completion(
        model=f"openai/{os.environ['MODEL']}",
        api_base=os.environ["OPENAI_BASE_URL"],
        messages=messages,
        tools=TOOLS,
        stream=True,
    )
    message = litellm.stream_chunk_builder(list(stream), messages=messages).choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for each in message.tool_calls:
        result = call(each.function.name, each.function.arguments)
        messages.append({"role": "tool", "tool_call_id": each.id, "content": result})
print(message.content)
