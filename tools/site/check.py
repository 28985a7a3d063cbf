#!/usr/bin/env python3
"""Check the pages of the built docs site: no page loads anything from another host, and no link within the site is broken."""

import posixpath
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

LOADED = {
    ("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src"),
    ("form", "action"),
}  # fmt: skip
"""Tags whose attribute makes a browser send a request."""


class PageParser(HTMLParser):
    """Collects the links of a page, the targets of links, and what a browser loads."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)
            is_link = tag == "link" and dict(attrs).get("rel") in ("canonical", "next", "prev", "edit")
            if (tag, name) in LOADED and not is_link:
                self.loaded.append(value)
            if tag == "a" and name == "href":
                self.links.append(value)


def mistakes(site: Path) -> list[str]:
    """A line about each request to another host and each broken link."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path.relative_to(site).as_posix()] = parser = PageParser()
        parser.feed(path.read_text(encoding="utf-8"))
    found = []
    for place, page in pages.items():
        if place == "404.html":  # its links begin at the root of the host
            continue
        found += [f"{place}: loads {url}" for url in page.loaded if urlsplit(url).netloc]
        for link in page.links:
            path, anchor = urldefrag(link)
            if urlsplit(link).scheme or urlsplit(link).netloc:
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(place), unquote(path))) if path else place
            if not (site / target).exists():
                found.append(f"{place}: {link}: no such file")
            elif anchor and target in pages and unquote(anchor) not in pages[target].anchors | {"__top"}:
                found.append(f"{place}: {link}: no such anchor")
    for path in sorted(site.rglob("*.css")):
        loads = re.findall(r"url\(\s*['\"]?((?:https?:)?//[^)'\"]+)", path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(site)}: loads {url}" for url in loads]
    return found


if __name__ == "__main__":
    lines = mistakes(Path(sys.argv[1]))
    print("\n".join(lines) or f"{sys.argv[1]}: no request to another host, and no broken link")
    sys.exit(1 if lines else 0)
