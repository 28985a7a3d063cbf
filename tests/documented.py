"""Examples of the documentation, for tests that run them."""

import re
import textwrap
from dataclasses import dataclass

from launching import ROOT

BLOCK = re.compile(r"^(?P<margin> *)```(?P<language>\S*)\n(?P<code>.*?)^(?P=margin)```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code of a page.

    Attributes:
        language: the word after the fence. line: the line of its fence, from 1.
    """

    language: str
    code: str
    line: int


def blocks_of(text: str) -> list[Block]:
    """All blocks of code of a text in Markdown, in order."""
    return [
        Block(found["language"], textwrap.dedent(found["code"]), text.count("\n", 0, found.start()) + 1)
        for found in BLOCK.finditer(text)
    ]


def page_text(page: str) -> str:
    """The text of a page of docs/."""
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    """The text of a page under a heading of the second level."""
    text = page_text(page)
    [begin] = [found.end() for found in re.finditer(rf"^## {re.escape(title)}$", text, re.MULTILINE)]
    return text[begin:].partition("\n## ")[0]


def example(page: str, first_line: str) -> str:
    """An example of a page, by the line that it begins with."""
    [code] = [block.code for block in blocks_of(page_text(page)) if block.code.startswith(first_line)]
    return code


def first_example(page: str, title: str) -> str:
    """The first block of code under a heading of the second level."""
    return blocks_of(section(page, title))[0].code
