"""docs/tutorial.md on a laptop, with less data; tests/cluster/test_tutorial.py runs all of it as it is."""

import os
import shlex
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from inside import nothing_changes
from tutorial import CLUSTER, PAGE, Block, Shell, Tutorial, blocks_of, environment_of, laptop, normal

import hvdtrain.cli

OF_THE_DATA = r"\d+ more steps|\(\d+ steps? of|largest batch: .*|, step \d+"
"""What less data changes, besides measured numbers."""


def without_processes(folder: Path) -> Shell:
    """The laptop on which one rank runs in this process."""
    elsewhere = laptop(folder)

    def run(command: str) -> tuple[int, str]:
        words = shlex.split(command.removesuffix(" || true"))
        if words[:3] != ["python", "-m", "hvdtrain"]:
            return elsewhere(command)
        with nothing_changes(), redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
            os.environ |= {name: environment_of(folder)[name] for name in ("COLUMNS", "NO_COLOR")}
            os.chdir(folder)
            status = hvdtrain.cli.main(words[3:])
        return 0 if command.endswith(" || true") else status, printed.getvalue()

    return run


@pytest.mark.again  # the same, with more data and on a cluster
@pytest.mark.slow
def test_the_commands_on_a_laptop_print_what_the_page_shows(tmp_path: Path) -> None:
    page = PAGE.read_text()
    folder = tmp_path / "tutorial"
    folder.mkdir()
    part = page[: page.index(CLUSTER)]
    assert not any(block.note("on") for block in blocks_of(part))
    smaller = part.replace('("train", 2000)', '("train", 240)')
    assert smaller != part
    tutorial = Tutorial(folder, without_processes(folder), varies=OF_THE_DATA)
    assert tutorial.run(smaller) == smaller, "run .venv/bin/python tests/tutorial.py"


def test_only_measurements_may_differ() -> None:
    assert normal("took  0:03, 1.5 s, 12 MB: ce 0.35") == normal("took 0:14, 2.25 s, 9 MB:  ce 0.41")
    assert normal("3 ranks") != normal("2 ranks")
    assert normal("epoch 7 ends") != normal("epoch 8 ends")
    assert normal("epoch 7 ends", r"epoch \d+") == normal("epoch 8 ends", r"epoch \d+")


def test_outputs_are_replaced_where_they_differ(tmp_path: Path) -> None:
    page = "<!-- file: a.py -->\n```python\nprint(1)\n```\n\n"
    page += "```console\n$ one \\\n    more\nold 1.5\nline\n$ two\nold 2.5\n```\nend\n"
    printed = {"one \\\n    more": "new 1.5\n", "two": "old 7.25\n"}
    written = Tutorial(tmp_path, lambda command: (0, printed[command])).run(page)
    assert written == page.replace("old 1.5\nline\n", "new 1.5\n")
    assert (tmp_path / "a.py").read_text() == "print(1)\n"
    [file, console] = blocks_of(page)
    assert file == Block((("file", "a.py"),), "python", "print(1)\n", file.place)
    assert [command for command, _ in console.commands()] == list(printed)
