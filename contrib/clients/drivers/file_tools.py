"""The two tools of the drivers: as functions, as schemas of OpenAI's, and as they are called."""

import json
from pathlib import Path


def read_file(path: str) -> str:
    """Reads a file."""
    return Path(path).read_text(encoding="utf-8")


def write_file(path: str, content: str) -> str:
    """Writes a file."""
    Path(path).write_text(content, encoding="utf-8", newline="")
    return "written"


_FUNCTIONS = {"read_file": (read_file, ("path",)), "write_file": (write_file, ("path", "content"))}
SCHEMAS = [
    {
        "name": name,
        "description": f"{name} in the working folder",
        "parameters": {
            "type": "object",
            "properties": {each: {"type": "string"} for each in given},
            "required": [*given],
        },
    }
    for name, (_, given) in _FUNCTIONS.items()
]
TOOLS = [{"type": "function", "function": schema} for schema in SCHEMAS]


def call(name: str, arguments: str) -> str:
    return _FUNCTIONS[name][0](**json.loads(arguments))
