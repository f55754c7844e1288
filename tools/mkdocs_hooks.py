"""Lets pages of docs/ link to files beside that folder, as they do on GitHub, in the site that mkdocs builds too.

mkdocs knows the files of its own folder only. A link such as `../SECURITY.md` would be right in the repository and
wrong in the site, so each file that a page names that way is put into the site, below `repository/`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_LINK = re.compile(r"\]\(((?:\.\./)+)([^)#\s]+)")
_TO_DOCS = re.compile(r"\]\((?:\.\./)*docs/")
# Where such files are in the site.
_OUTSIDE = "repository/"


def on_files(files: Files, config: Any) -> Files:
    """Adds the files outside docs/ that its pages link to; one that is missing stays a broken link."""
    root = Path(config.docs_dir).parent
    names = set()
    for file in files.documentation_pages():
        if file.abs_src_path:
            text = Path(file.abs_src_path).read_text(encoding="utf-8")
            names |= {name for up, name in _LINK.findall(text) if _leaves(up, file.src_uri)}
    for name in sorted(names):
        if (root / name).is_file():
            files.append(File.generated(config, f"{_OUTSIDE}{name}", abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Returns the page's text with its links from and to those files as the site has them."""
    place = page.file.src_uri
    to_root = "../" * place.count("/")
    if place.startswith(_OUTSIDE):
        return _TO_DOCS.sub(f"]({to_root}", markdown)

    def inside(link: re.Match[str]) -> str:
        return f"]({to_root}{_OUTSIDE}{link[2]}" if _leaves(link[1], place) else link[0]

    return _LINK.sub(inside, markdown)


def _leaves(up: str, place: str) -> bool:
    """Returns True if a link of a page at `place` goes up to the folder that holds docs/."""
    return up.count("../") == place.count("/") + 1
