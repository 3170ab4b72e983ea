"""Hooks of the site: CONTRIBUTING.md and CHANGELOG.md become pages, and links that leave docs/ are made to fit.

The same Markdown is read on a code host, where a page may link to a source file. The site has no source files: there
such a link becomes its text. A rule's number, such as R12, becomes a link to the rule.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RULES = "reference/rules.md"
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
RULE = re.compile(
    r"(?ms)^ *(?P<fence>```+|~~~+).*?^ *(?P=fence) *$|^#[^\n]*$|^(?: {4}|\t)[^\n]*$"  # code blocks and headings,
    r"|`[^`\n]*`|\[[^\]\n]*\]\([^)\n]*\)|<[^>\n]*>"  # code and links stay as they are
    r"|(?<![\w/#.-])(?P<rule>R[1-9]\d?)\b(?![-/.]\w)"
)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages whose source stands in the repository's root."""
    from mkdocs.structure.files import File

    for source, page in ROOT_PAGES.items():
        if page != "index.md":
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of one page."""
    name = page.file.src_uri
    return link_rules(rewrite(markdown, name), name)


def link_rules(markdown: str, page: str) -> str:
    """Returns the page's text with every rule's number outside code, headings and links made into a link."""
    if page == RULES:
        return markdown
    target = posixpath.relpath(RULES, posixpath.dirname(page) or ".")

    def link(match: re.Match[str]) -> str:
        return match[0] if match["rule"] is None else f"[{match['rule']}]({target}#{match['rule'].lower()})"

    return RULE.sub(link, markdown)


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
