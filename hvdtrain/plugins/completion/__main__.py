"""Completion of commands, options and keys in the shell: `eval "$(register-python-argcomplete hvdtrain)"`.

The shell runs the program with the line in its environment, and argcomplete answers from a parser. It is imported only then.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin

from hvdtrain.cli import ASKS_TO_COMPLETE, COMMANDS
from hvdtrain.comm import this_process
from hvdtrain.config.absent import import_part
from hvdtrain.config.command_line import OPTIONS, command_parser
from hvdtrain.config.keys import Key, declared_keys

SET_UP = 'eval "$(register-python-argcomplete hvdtrain)"'
"""What makes a shell ask."""


def main(arguments: list[str]) -> int:
    """Answer a shell, or say how to make it ask; returns the exit status."""
    words = words_to_complete(this_process.environment())
    if words is None:
        command_parser("completion", "Say how a shell is made to complete commands, options and keys.", "").parse_args(arguments)
        print(f"{SET_UP}  # in ~/.bashrc; zsh: after autoload -U bashcompinit && bashcompinit")
        return 0
    return complete(words)


def complete(words: list[str]) -> int:
    """Complete a command line for a shell; return the exit status.

    Args:
        words: the arguments up to the cursor.
    """
    if len(words) > 1 and words[0] in COMMANDS and not any(word.startswith("++") for word in words):
        this_process.put({ASKS_TO_COMPLETE: "2"})  # the command's own arguments begin after its name
        module = import_part(COMMANDS[words[0]][1])
        parser = module.parser() if hasattr(module, "parser") else argparse.ArgumentParser()
    else:
        from hvdtrain.settings import DATASET_SECTIONS, DATASETS, DICTS, all_keys, entries_of

        dataset_keys = [key for section in DATASET_SECTIONS for key in declared_keys(section)]
        entries = {name: entries_of(name) for name in DICTS} | dict.fromkeys(DATASETS, dataset_keys)
        parser = training_parser(words, all_keys(), entries, COMMANDS, OPTIONS)
    answer(parser)
    return 0


def words_to_complete(environ: Mapping[str, str]) -> list[str] | None:
    """The arguments up to the cursor; the last one is to be completed, and may be empty. None: this is not a shell's question.

    >>> words_to_complete({"_ARGCOMPLETE": "1", "COMP_LINE": "hvdtrain config.py ++max_se", "COMP_POINT": "27"})
    ['config.py', '++max_se']
    >>> words_to_complete({"_ARGCOMPLETE": "1", "COMP_LINE": "hvdtrain ", "COMP_POINT": "9"}), words_to_complete({})
    ([''], None)
    """
    if ASKS_TO_COMPLETE not in environ:
        return None
    line = environ.get("COMP_LINE", "")[: int(environ.get("COMP_POINT", "0"))]
    return [*line.split()[1:], *([""] if line[-1:].isspace() else [])]


def answer(parser: argparse.ArgumentParser) -> None:
    """Send the completions that a parser offers to the shell, and end the process."""
    try:
        import argcomplete
    except ImportError:
        raise SystemExit("hvdtrain: expected argcomplete for completion, got none (pip install argcomplete)") from None
    argcomplete.autocomplete(parser, always_complete_options=False, exit_method=_leave)


def _leave(status: int = 0) -> None:
    raise SystemExit(status)


def training_parser(
    words: list[str], keys: Iterable[Key], entries: Mapping[str, Iterable[Key]], commands: Iterable[str], options: Iterable[str]
) -> argparse.ArgumentParser:
    """A parser with every key of a config as an option, for completion only.

    Args:
        words: the arguments up to the cursor.
        keys: of a config.
        entries: by the name of a dict, the keys in it. They are offered once a word has a dot.
        commands: offered as the first word.
        options: of the program.
    """
    parser = argparse.ArgumentParser(prefix_chars="+-", add_help=False, allow_abbrev=False)
    for option in options:
        parser.add_argument(option, action="store_true")
    names = {f"++{key.name}": key for key in keys}
    if "." in words[-1].partition("=")[0]:
        names |= {f"++{name}.{key.name}": key for name, section in entries.items() for key in section}
    for name, key in names.items():
        parser.add_argument(name, choices=values_of(key), help=key.doc.replace("%", "%%"))
    files: Any = parser.add_argument("configs", nargs="*")
    if len(words) == 1:
        files.completer = lambda prefix, **_: [*commands, *_files(prefix)]
    return parser


def values_of(key: Key) -> list[str] | None:
    """The values that a key may have, if they can be listed."""
    kinds = [key.type, *get_args(key.type)]
    values = [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    if bool in kinds:
        values += ["true", "false"]
    if key.rule is not None and key.rule.is_choice:
        values += re.findall(r"'([^']+)'", key.rule.words)
    return values or None


def _files(prefix: str) -> list[str]:
    from argcomplete.completers import FilesCompleter

    return list(FilesCompleter()(prefix))
