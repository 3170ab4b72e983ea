"""Links between pages, in the repository's view and in the site's: every file and every anchor exists."""

import importlib.util
import posixpath
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness.repository import ROOT

PAGES = [
    *sorted(path for path in (ROOT / "docs").rglob("*.md")),
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "models/README.md", "changes/README.md")
    ),
]
MADE_BY_HOOK = {"contributing.md", "changelog.md"}
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)[^)]*\)|(?:href|src|srcset)=\"(?P<attribute>[^\"]+)\"")


def prose(page: Path) -> str:
    """Returns the page without code blocks and inline code."""
    text = re.sub(r"(?ms)^( *)(```+|~~~+).*?^ *\2 *$", "", page.read_text())
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page as a code host makes them: those of its headings, and those written by hand."""
    text = re.sub(r"(?ms)^( *)(```+|~~~+).*?^ *\2 *$", "", page.read_text())
    found: set[str] = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(r"(?m)^#{1,6} +(.+?) *#*$", text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        name, number = slug, 1
        while name in found:
            name, number = f"{slug}-{number}", number + 1
        found.add(name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_are_alive(page: Path) -> None:
    dead = []
    for match in LINK.finditer(prose(page)):
        target = match["target"] or match["attribute"]
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            dead.append(target)
    assert not dead, f"{page.relative_to(ROOT)} links to what is not there: {dead}"


def test_every_page_is_in_the_sites_navigation() -> None:
    listed = set(re.findall(r"(?m)^ +- .*?: ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    pages -= {page for page in pages if page.startswith("decisions/0")}  # these are listed by their index
    assert listed == pages | MADE_BY_HOOK


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "_site" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "link", "fitted"),
    [
        ("index.md", "[a](policy.md)", "[a](policy.md)"),
        ("index.md", "[a](../CONTRIBUTING.md)", "[a](contributing.md)"),
        ("how-to/serve.md", "[a](../../CONTRIBUTING.md#x)", "[a](../contributing.md#x)"),
        ("how-to/serve.md", "[a](../../README.md)", "[a](../index.md)"),
        ("how-to/serve.md", "[a](../../src/kvferry/errors.py)", "a"),
        ("how-to/serve.md", "[a](#below)", "[a](#below)"),
        ("contributing.md", "[a](docs/policy.md)", "[a](policy.md)"),
        ("contributing.md", "[a](tests/conftest.py)", "a"),
        ("changelog.md", "[a](docs/how-to/vllm.md#x)", "[a](how-to/vllm.md#x)"),
    ],
)
def test_links_fit_the_site(hooks: ModuleType, page: str, link: str, fitted: str) -> None:
    assert hooks.rewrite(link, page) == fitted


@pytest.mark.parametrize(
    ("text", "linked"),
    [
        ("As R12 says (R3, R4).", "As [R12](rules.md#r12) says ([R3](rules.md#r3), [R4](rules.md#r4))."),
        ("| a | R3 R4 |", "| a | [R3](rules.md#r3) [R4](rules.md#r4) |"),
        ("`R12` and [R12](x.md) stay", "`R12` and [R12](x.md) stay"),
        ("# About R12", "# About R12"),
        ("```\nR12\n```\nR1", "```\nR12\n```\n[R1](rules.md#r1)"),
        ("DeepSeek-R1, R2D2, a/R1", "DeepSeek-R1, R2D2, a/R1"),
    ],
)
def test_numbers_of_rules_become_links(hooks: ModuleType, text: str, linked: str) -> None:
    assert hooks.link_rules(text, "reference/wire.md") == linked


def test_every_link_of_every_page_fits_the_site(hooks: ModuleType) -> None:
    pages = {str(page.relative_to(ROOT / "docs")): page for page in (ROOT / "docs").rglob("*.md")}
    pages |= {"contributing.md": ROOT / "CONTRIBUTING.md", "changelog.md": ROOT / "CHANGELOG.md"}
    for name, page in pages.items():
        for match in LINK.finditer(hooks.rewrite(prose(page), name)):
            target = match["target"] or ""
            if not target or re.match(r"[a-z]+:", target) or target.startswith("#"):
                continue
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target.partition("#")[0]))
            assert path in pages or (ROOT / "docs" / path).is_file(), f"{name}: {target}"
