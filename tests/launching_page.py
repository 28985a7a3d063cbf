"""docs/launching.md as the tests read it: its tables of commands and its job scripts."""

import re
from dataclasses import dataclass

from launching import ROOT

PAGE = ROOT / "docs" / "launching.md"
HEADER = "| there | here | held by |"
MODES = ("runs", "demo", "refused", "requeued", "not run")


@dataclass(frozen=True)
class Command:
    """What the page says of one way to start a job.

    Attributes:
        lines: the commands, each with the host to run it on; of a job script, the script.
        mode: one of MODES. ranks: how many there are to be. without: what is left out, as it cannot be had.
    """

    name: str
    lines: tuple[tuple[str, str], ...]
    script: bool
    mode: str
    ranks: int
    same_losses: bool
    without: str


def read_page() -> list[Command]:
    """All of the page's commands, in order."""
    text = PAGE.read_text()
    found = []
    for table in re.findall(rf"{re.escape(HEADER)}\n\|---\|---\|---\|\n((?:\|.*\n)+)", text):
        for row in table.splitlines():
            cells = re.split(r"(?<!\\)\|", row)
            assert len(cells) == 5, row
            if cells[3].strip() == "runs":  # as what stands elsewhere on the page
                continue
            commands = re.findall(r"(?:on (host\d): )?`([^`]+)`", cells[2])
            found.append(_command(tuple((host or "head", command) for host, command in commands), cells[3].strip(), False))
    for held_by, script in re.findall(r"<!-- ([^\n]*) -->\n```bash\n(.*?)```", text, flags=re.DOTALL):
        found.append(_command((("head", script),), held_by, True))
    return found


def _command(lines: tuple[tuple[str, str], ...], held_by: str, script: bool) -> Command:
    form = rf"({'|'.join(MODES)})(?: without `(.+)`)?: (?:(\d+) ranks?(, same losses)?|.+)"
    match = re.fullmatch(form, held_by)
    assert match is not None, f"not understood in {PAGE.name}: {held_by}"
    mode, without, ranks, same = match.groups()
    assert mode == "not run" or ranks is not None or mode == "refused", held_by
    name = "; ".join(command for _, command in lines)
    if script:
        name = "script of " + next(line for line in name.splitlines() if not line.startswith("#"))
    return Command(name, lines, script, mode, int(ranks or 0), same is not None, without or "")
