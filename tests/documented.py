"""Examples of the documentation, for tests that run them."""

import re

from launching import ROOT


def example(page: str, first_line: str) -> str:
    """An example of a documentation page, by the line that it begins with."""
    text = (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"(?:^(?: {4}.*)?\n)+", text, flags=re.M)
    [block] = [one.strip("\n") for one in blocks if one.strip("\n").startswith(f"    {first_line}")]
    return "\n".join(line[4:] for line in block.splitlines()) + "\n"
