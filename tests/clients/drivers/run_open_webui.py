"""Open WebUI on a server of this run: an agent loop at its API or, with a Chromium named, its page as a person uses it.

Ctrl-C comes to this program alone: it leaves the API's stream, or presses the page's stop button.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

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


NEWEST = "[...document.querySelectorAll('.message-listitem [id^=message-]')].at(-1)"
STOP = """document.querySelector('[aria-label="Stop"]')"""


def ask_page(url: str, prompt: str, executable: str) -> None:
    """Sends prompts until a file was shown, which is copied off the page, or there is an end; prints what is shown."""
    from browser import browse

    with browse(executable, Path(os.environ["HOME"]) / "profile") as page:
        page.view(1280, 900)
        page.open(url)
        # News of this version, at the first visit.
        page.until("[...document.querySelectorAll('button')].some(e => /Let.s Go/.test(e.innerText) && !e.click())")
        page.until("!document.body.innerText.includes('Go!')")
        page.until(f"document.querySelector('[aria-label=\"Selected model: {MODEL}\"]')")
        page.evaluate("navigator.clipboard.writeText = async text => { window.copied = text; }")
        while prompt:
            page.evaluate(f"window.before = {NEWEST}?.id; document.querySelector('#chat-input').focus()")
            page.call("Input.insertText", text=prompt)
            page.until("(e => e && !e.disabled && !e.click())(document.querySelector('#send-message-button'))")
            try:
                page.until(f"(e => e.id !== before && e.querySelector('[aria-label=Regenerate]'))({NEWEST})")
            except KeyboardInterrupt:
                page.evaluate(f"{STOP}.click()")
                page.until(f"!{STOP}")
                return
            print(answer := page.evaluate(f"{NEWEST}.innerText"))
            page.evaluate(f"{NEWEST}.querySelector('[aria-label=Copy]').click()")
            if fenced := re.search(r"(?s)```python\n(.*)```", page.evaluate("window.copied") or ""):
                Path("written.py").write_text(fenced[1], encoding="utf-8", newline="")
            is_last = re.search(r"Everything is written|word1\b|context_length_exceeded", answer)
            prompt = "" if is_last else "Go on."


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
    if len(sys.argv) > 1:
        ask_page(url, prompt, sys.argv[1])
    else:
        ask_api(url, key, prompt)
finally:
    server.terminate()
    server.wait()
