"""docs/tutorial.md on a laptop; tests/cluster/test_tutorial.py runs all of it."""

from pathlib import Path

from tutorial import CLUSTER, PAGE, Block, Tutorial, blocks_of, laptop, normal


def test_the_commands_on_a_laptop_print_what_the_page_shows(tmp_path: Path) -> None:
    page = PAGE.read_text()
    folder = tmp_path / "tutorial"
    folder.mkdir()
    part = page[: page.index(CLUSTER)]
    assert not any(block.note("on") for block in blocks_of(part))
    assert Tutorial(folder, laptop(folder)).run(part) == part, "run .venv/bin/python tests/tutorial.py"


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
