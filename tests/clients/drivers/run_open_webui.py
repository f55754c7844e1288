"""Open WebUI's own API, which is what its page speaks to as well: a server of ours, and an agent loop at it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
from openai import OpenAI

MODEL = os.environ["MODEL"]
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


def token(url: str) -> str:
    """Of the only user; without accounts anyone may sign in."""
    with httpx.Client(transport=httpx.HTTPTransport(retries=9), timeout=200) as http:
        # The retries of a connection take 0.5 s, 1 s, 2 s, … (httpx), which is longer than any start.
        return http.post(f"{url}/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]


with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
prompt = sys.stdin.read()
server = subprocess.Popen(
    ["open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)],
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    env={**os.environ, "DATA_DIR": f"{os.environ['HOME']}/data"},
)
try:
    url = f"http://127.0.0.1:{port}"
    client = OpenAI(base_url=f"{url}/api", api_key=token(url), max_retries=0)
    messages = [{"role": "user", "content": prompt}]
    while True:
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
            message = stream.get_final_completion().choices[0].message
        if not message.tool_calls:
            print(message.content)
            break
        calls = [each.model_dump(include={"id", "type", "function"}) for each in message.tool_calls]
        for each in calls:
            each["function"].pop("parsed_arguments", None)
        messages.append({"role": "assistant", "content": message.content or "", "tool_calls": calls})
        for each in message.tool_calls:
            result = call(each.function.name, each.function.arguments)
            messages.append({"role": "tool", "tool_call_id": each.id, "content": result})
finally:
    server.terminate()
    server.wait()
