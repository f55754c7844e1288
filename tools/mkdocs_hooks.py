"""Lets pages of docs/ link to files beside that folder, as they do on GitHub, in the site that mkdocs builds too.

mkdocs knows the files of its own folder only. A link such as `../SECURITY.md` would be right in the repository and
wrong in the site, so each file that a page names that way is put into the site, below `repository/`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_LINK = re.compile(r"\]\(\.\./([^)#\s]+)")
# Where such files are in the site, and how they link back.
_OUTSIDE, _TO_DOCS = "repository/", "](docs/"


def on_files(files: Files, config: Any) -> Files:
    """Adds the files outside docs/ that its pages link to; one that is missing stays a broken link."""
    root = Path(config.docs_dir).parent
    pages = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    for name in sorted({name for page in pages for name in _LINK.findall(page.read_text(encoding="utf-8"))}):
        if (root / name).is_file():
            files.append(File.generated(config, f"{_OUTSIDE}{name}", abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Returns the page's text with its links from and to those files as the site has them."""
    if page.file.src_uri.startswith(_OUTSIDE):
        return markdown.replace(_TO_DOCS, "](../")
    return _LINK.sub(rf"]({_OUTSIDE}\1", markdown) if "/" not in page.file.src_uri else markdown
