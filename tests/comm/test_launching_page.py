"""The commands of docs/launching.md, as far as they can be judged without starting them; tests/cluster starts them."""

import re

from launching_page import HEADER, MODES, PAGE, read_page

from hvdtrain.settings import all_keys


def test_every_row_and_script_is_read() -> None:
    text = PAGE.read_text()
    rows = sum(len(part.split("\n\n")[0].splitlines()) - 2 for part in text.split(HEADER)[1:])
    elsewhere = text.count("| runs |\n")  # rows that point to another command of the page
    assert len(read_page()) == rows - elsewhere + text.count("```bash\n#!/bin/bash") >= 15
    assert {command.mode for command in read_page()} <= set(MODES)


def test_commands_name_keys_that_there_are() -> None:
    known = {key.name for key in all_keys()}
    named = re.findall(r"\+\+([\w.]+)(?![\w.]|<tab>| value|=value)", PAGE.read_text())
    assert len(named) > 15
    assert {name.split(".")[0] for name in named} <= known


def test_most_commands_are_run_and_the_others_say_why_not() -> None:
    commands = read_page()
    run = [command for command in commands if command.mode != "not run"]
    assert len(run) > 0.7 * len(commands)
    assert all(command.lines for command in run)
