"""An agent loop of LiteLLM's library, streamed and put together by its own builder."""

import os
import sys

import litellm
from file_tools import TOOLS, call

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
