"""Open WebUI on a server of this run: an agent loop at its API.

Ctrl-C comes to this program alone: it leaves the API's stream.
"""

import os
import socket
import subprocess
import sys

import httpx
from file_tools import TOOLS, call
from openai import OpenAI

MODEL = os.environ["MODEL"]


def token(url: str) -> str:
    """Of the only user; without accounts anyone may sign in."""
    with httpx.Client(transport=httpx.HTTPTransport(retries=9), timeout=200) as http:
        # The retries of a connection take 0.5 s, 1 s, 2 s, … (httpx), which is longer than any start.
        return http.post(f"{url}/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]


def ask_api(url: str, key: str, prompt: str) -> None:
    """Runs the tools that the answers call, and prints the last answer."""
    client = OpenAI(base_url=f"{url}/api", api_key=key, max_retries=0)
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
    key = token(url)
    ask_api(url, key, prompt)
finally:
    server.terminate()
    server.wait()
