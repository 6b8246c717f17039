"""Every link between pages of this repository leads somewhere, headings included."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# `.github` is the one hidden folder with pages of ours.
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob(".github/**/*.md"), *ROOT.glob("[!.]*/**/*.md")])
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: pathlib.Path) -> set[str]:
    """The names GitHub gives to headings: small letters, hyphens for spaces, no other signs."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: pathlib.Path) -> list[str]:
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        if ":" in path:  # https:, mailto:
            continue
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    assert not broken_links(page)


def test_a_broken_link_is_seen(tmp_path: pathlib.Path) -> None:
    (tmp_path / "there.md").write_text("# What it is (for `you`)\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md#what-it-is-for-you) [b](gone.md) [c](there.md#gone) [d](https://example.org/x)\n")
    assert broken_links(page) == ["gone.md", "there.md#gone"]
