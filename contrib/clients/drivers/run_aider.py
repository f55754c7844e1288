"""aider's own scripting interface: one prompt after another, until the file is written or there is nothing to write."""

import os
import sys
from pathlib import Path

from aider.coders import Coder
from aider.io import InputOutput
from aider.models import Model

prompt = sys.stdin.read()
target = Path("written.py")
model = Model(os.environ["AIDER_MODEL"])
coder = Coder.create(
    main_model=model,
    edit_format="whole",
    fnames=[str(target)],
    io=InputOutput(yes=True, pretty=False, fancy_input=False),
    use_git=False,
    map_tokens=0,
    suggest_shell_commands=False,
    detect_urls=False,
)
for _ in range(60):
    answer = coder.run(prompt)
    # It tells of an error, or of Ctrl-C, and waits for the next prompt.
    if not answer or "^C KeyboardInterrupt" in str([*coder.done_messages[-2:], *coder.cur_messages[-2:]]):
        sys.exit(1)
    if "Everything is written." in answer or "word1 " in answer:
        break
    prompt = "Go on."
