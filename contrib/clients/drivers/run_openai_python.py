"""An agent loop of the openai library, streamed: chat completions or responses, by the model's name."""

import os
import sys

from file_tools import SCHEMAS, TOOLS, call
from openai import OpenAI

MODEL = os.environ["MODEL"]


def chat(client: OpenAI, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    while True:
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
            message = stream.get_final_completion().choices[0].message
        if not message.tool_calls:
            return message.content or ""
        calls = [
            {
                "id": each.id,
                "type": "function",
                "function": {"name": each.function.name, "arguments": each.function.arguments},
            }
            for each in message.tool_calls
        ]
        messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
        for each in message.tool_calls:
            result = call(each.function.name, each.function.arguments)
            messages.append({"role": "tool", "tool_call_id": each.id, "content": result})


def responses(client: OpenAI, prompt: str) -> str:
    items = [{"role": "user", "content": prompt}]
    while True:
        tools = [{"type": "function", "strict": False, **schema} for schema in SCHEMAS]
        with client.responses.stream(model=MODEL, input=items, tools=tools) as stream:
            response = stream.get_final_response()
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += [
            {"type": "function_call", "call_id": each.call_id, "name": each.name, "arguments": each.arguments}
            for each in calls
        ]
        for each in calls:
            result = call(each.name, each.arguments)
            items.append({"type": "function_call_output", "call_id": each.call_id, "output": result})


print((responses if "responses" in MODEL else chat)(OpenAI(), sys.stdin.read()))
