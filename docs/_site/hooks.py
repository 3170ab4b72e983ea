"""Hooks of the site: CONTRIBUTING.md and CHANGELOG.md become pages, and links that leave docs/ are made to fit.

The same Markdown is read on a code host, where a page may link to a source file. The site has no source files: there
such a link becomes its text.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages whose source stands in the repository's root."""
    from mkdocs.structure.files import File

    for source, page in ROOT_PAGES.items():
        if page != "index.md":
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of one page."""
    return rewrite(markdown, page.file.src_uri)


def rewrite(markdown: str, page: str) -> str:
    """Returns the page's text with every relative link turned into one that the site can follow."""
    sources = {target: source for source, target in ROOT_PAGES.items() if target != "index.md"}
    where = sources.get(page, f"docs/{page}")  # where the page stands in the repository

    def fit(match: re.Match[str]) -> str:
        target = match["target"]
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(where), target))
        if path in ROOT_PAGES:
            path = ROOT_PAGES[path]
        elif path.startswith("docs/"):
            path = path.removeprefix("docs/")
        else:
            return match["text"]
        return f"[{match['text']}]({posixpath.relpath(path, posixpath.dirname(page) or '.')}{match['anchor'] or ''})"

    return LINK.sub(fit, markdown)
