"""The tools that llm is given."""


def read_file(path: str) -> str:
    """Reads a file."""
    with open(path, encoding="utf-8") as file:  # noqa: PTH123 - llm makes a tool of each name here
        return file.read()


def write_file(path: str, content: str) -> str:
    """Writes a file."""
    with open(path, "w", encoding="utf-8", newline="") as file:  # noqa: PTH123
        file.write(content)
    return "written"
