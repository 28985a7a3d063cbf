"""What the docs site has besides the pages of docs/: README as its first page, and the files that pages link to.

Pages link to files as they lie in the repository, so that the links work on GitHub. Files outside of docs/ are pages here, too:
Markdown as it is, code in a block with its highlighting.
"""

from __future__ import annotations

import html
import itertools
import json
import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

PAGES = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
"""Files outside of docs/ that are pages of the navigation."""

BOOST = {
    "messages.md": 2,
    "troubleshooting.md": 2,
    "glossary.md": 0.5,
    "decisions.md": 0.3,
    "status.md": 0.3,
    "trust.md": 0.3,
    "CHANGELOG.md": 0.2,
    "returnn_keys.md": 0.2,
}
"""How much more than on other pages a word counts in a search."""

OF_A_KEY, OF_A_BEGINNING, OF_A_MESSAGE = 5, 10, {"messages.md": 3, "troubleshooting.md": 4}
"""The same for the row of a key, whose title is its name; for one whose name is the beginning of others, which a search for it
finds, too; and for a message."""

LINK = re.compile(r"(?P<begin>!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()(?P<path>[^\s():#]+)(?P<anchor>#[^\s)]*)?\)")
KEY = re.compile(r"^\| (?P<anchors>(?:<a id=\"[^\"]+\"></a>)+)(?P<names>.*?) \| (?P<text>.*) \|$", re.MULTILINE)
MESSAGES = {
    "messages.md": re.compile(r"^(?P<begin>- )(?P<quotes>`+) ?(?P<text>.*?) ?(?P=quotes)$", re.MULTILINE),
    "troubleshooting.md": re.compile(r"^(?P<begin>)```text\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL),
}
"""The messages that a page explains, below a heading of the third level."""
FENCE = re.compile(r"^(?P<margin> *)```.*?^(?P=margin)```$", re.MULTILINE | re.DOTALL)

LANGUAGES = {".py": "python", ".js": "javascript", ".css": "css", ".sh": "bash", ".def": "bash", ".toml": "toml"}

ASSETS = ("site.css", "iframe-worker.js", "search.js")
"""Files of this folder that pages load."""


class SmallIndents(Extension):
    """As on GitHub, what belongs to an item of a list is indented as far as its text: by two spaces."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  # the name in Markdown
        md.tab_length = 2


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Read Markdown as GitHub does."""
    config.markdown_extensions.append(SmallIndents())  # type: ignore[arg-type]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for name in ASSETS:
        files.append(File.generated(config, f"assets/{name}", content=(HERE / name).read_text(encoding="utf-8")))
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for name, place in PAGES.items():
        texts[name] = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=texts[name]))
    done = set(map(site_place, texts))
    wanted = [target for name, text in texts.items() for target in targets(name, text)]
    while wanted:
        name = wanted.pop()
        place = site_place(name)
        path = ROOT / name
        if place in done or name.startswith("docs/") or not path.exists():
            continue
        done.add(place)
        text = "" if path.is_dir() else path.read_text(encoding="utf-8")
        if path.is_dir():
            inside = sorted(file.relative_to(ROOT).as_posix() for file in path.rglob("*") if file.suffix in LANGUAGES)
            text = f"# {name}/\n\n" + "".join(f"- `{file}`\n" for file in inside)
        elif path.suffix == ".md":
            wanted += targets(name, text)
        else:
            text = f"# {name}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n```\n"
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files of the repository lead to their pages, and a search find documents, not code."""
    place = page.file.src_uri
    name = repository_name(place)
    if place.startswith("source/"):
        page.meta["search"] = {"exclude": True}
    elif place in BOOST:
        page.meta["search"] = {"boost": BOOST[place]}

    if place in MESSAGES:
        numbers = itertools.count(1)
        markdown = MESSAGES[place].sub(lambda found: with_anchor(found, next(numbers)), markdown)

    def on_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), link["path"]))
        path = posixpath.relpath(site_place(target), posixpath.dirname(place) or ".")
        begin = link["begin"]
        if begin.endswith((f"[{link['path']}](", f"[{posixpath.basename(target)}](")) and target.startswith("docs/"):
            begin = f"[{title_of(ROOT / target)}]("  # the name of a file means nothing to a reader of the site
        return f"{begin}{path}{link['anchor'] or ''})"

    return outside_of_code(markdown, lambda text: LINK.sub(on_site, text))


def on_page_content(content: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let site.css know the page of the keys, whose rows are blocks on a phone."""
    return f'<div class="keys">{content}</div>' if page.file.src_uri == "keys.md" else content


def on_post_build(*, config: MkDocsConfig) -> None:
    """Let a search find the row of a key and a single message, besides sections of pages. (The plugin `offline` comes later.)"""
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    rows = list(KEY.finditer((ROOT / "docs" / "keys.md").read_text(encoding="utf-8")))
    names = [row["names"].replace("`", "") for row in rows]
    for row, name in zip(rows, names, strict=True):
        anchor = re.findall(r'id="([^"]+)"', row["anchors"])[0]
        begins = any(other.startswith(name) and other != name for other in names)
        index["docs"].append(
            entry(f"keys.html#{anchor}", name, row["text"].replace(" | ", "; "), OF_A_BEGINNING if begins else OF_A_KEY)
        )
    for page, message in MESSAGES.items():
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for number, found in enumerate(message.finditer(text), start=1):
            title = text[: found.start()].rpartition("\n### ")[2].partition("\n")[0]
            location = f"{page.removesuffix('.md')}.html#message-{number}"
            index["docs"].append(entry(location, title, found["text"], OF_A_MESSAGE[page]))
    path.write_text(json.dumps(index), encoding="utf-8")


def with_anchor(found: re.Match[str], number: int) -> str:
    """A message with an anchor in front of it: in the item of a list, or before a block of code."""
    anchor = f'<a id="message-{number}"></a>'
    begin = found["begin"]
    return f"{begin}{anchor}{found[0].removeprefix(begin)}" if begin else f"{anchor}\n\n{found[0]}"


def entry(location: str, title: str, text: str, boost: float) -> dict[str, Any]:
    """What the search knows of a place of the site."""
    return {"location": location, "title": html.escape(title), "text": f"<p>{html.escape(text)}</p>", "boost": boost}


@cache
def title_of(page: Path) -> str:
    """The heading of a page."""
    found = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else page.stem


def targets(name: str, text: str) -> list[str]:
    """The files of the repository that the text of another one links to."""
    found: list[str] = []
    outside_of_code(text, lambda part: found.extend(link["path"] for link in LINK.finditer(part)) or part)
    return [posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) for path in found]


def site_place(name: str) -> str:
    """Where a file of the repository is on the site.

    >>> [site_place(name) for name in ("docs/images/report.png", "README.md", "configs/g2p.py", "benchmarks/README.md")]
    ['images/report.png', 'index.md', 'source/configs/g2p.py.md', 'source/benchmarks/README.md']
    """
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return PAGES.get(name) or f"source/{name}{'' if name.endswith('.md') else '.md'}"


def repository_name(place: str) -> str:
    """The file of the repository at a place of the site: the inverse of `site_place`."""
    names = {page: name for name, page in PAGES.items()}
    return names.get(place) or (place.removeprefix("source/") if place.startswith("source/") else f"docs/{place}")


def outside_of_code(text: str, change: Any) -> str:
    """The text with what is outside of blocks of code changed."""
    parts, end = [], 0
    for block in FENCE.finditer(text):
        parts += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(text[end:])])
