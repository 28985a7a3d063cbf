"""The command line: config files, overrides and options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from hvdtrain.config.plugins import synonym
from hvdtrain.errors import ConfigError, problem

OPTIONS = (
    "-h", "--help", "--dry-run", "--find-batch-size", "--summary", "--find-learning-rate", "--overfit-batches", "--print-config",
    "--changed", "--color", "--version",
)  # fmt: skip
"""Options of the program itself, besides keys."""


def parse_command_line(arguments: list[str]) -> tuple[list[Path], dict[str, str]]:
    """Parse config files followed by `++key value` pairs, or `++key=value`; a single config may be anywhere. Raises: ConfigError.

    >>> parse_command_line(["config.py", "++max_seqs", "128", "++train.seq_ordering=random"])
    ([PosixPath('config.py')], {'max_seqs': '128', 'train.seq_ordering': 'random'})
    """
    files = []
    words = without_local_rank(arguments)
    while words and not words[0].startswith(("+", "-")) and not _is_assignment(words[0]):
        files.append(Path(words.pop(0)))
    problems = []
    overrides = {}
    while words:
        word = words.pop(0)
        name, assigned, value = word.partition("=")
        if not files and not word.startswith(("+", "-")) and Path(word).is_file():
            files.append(Path(word))
            continue
        if not name.startswith("++") or len(name) == 2:
            value = value if assigned or not words or words[0].startswith(("+", "-")) else words.pop(0)
            meant = name.lstrip("-+").replace("-", "_")
            option = get_close_matches(word, OPTIONS, n=1, cutoff=0.8)
            hint = f"did you mean {_as_key(meant, value)}?" if meant else "python -m hvdtrain --help"
            hint = f"did you mean {option[0]}?" if option and option[0][:3] == word[:3] else hint
            hint = "configs are written first" if Path(word).is_file() else hint
            problems += problem("wrong-format", f"command line: expected ++KEY VALUE, got {word!r} ({hint})")
            continue
        if not assigned:
            if not words or _is_key(words[0]):
                problems += problem(
                    "missing", f"command line: expected a value after {name}, got {'the next key' if words else 'nothing'}"
                )
                continue
            value = words.pop(0)
        overrides[name[2:]] = value.removeprefix("+") if value.startswith("+-") else value
    if not files:
        problems[:0] = problem("missing", "command line: expected a config file first, got none (python -m hvdtrain --help)")
    if problems:
        raise ConfigError(problems)
    return files, overrides


def _as_key(name: str, value: str) -> str:
    """How to set a key on the command line, given its name, or another trainer's.

    >>> _as_key("lr", "3"), _as_key("hidden", ""), _as_key("weight_decay", "0.1")
    ('++learning_rate 3', '++hidden VALUE', "in the config: optimizer = {'class': ..., 'weight_decay': ...}")
    """
    key = synonym(name) or name
    return f"++{key} {value or 'VALUE'}" if key.isidentifier() or key == name else f"in the config: {key}"


def _is_assignment(word: str) -> bool:
    """Whether a word is meant as KEY=VALUE, not as a file."""
    return "=" in word and not Path(word).exists()


def split_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split a command's own arguments from the `++key value` pairs among them.

    >>> split_overrides(["config.py", "++max_seqs", "128", "--json"])
    (['config.py', '--json'], ['++max_seqs', '128'])
    """
    own_arguments: list[str] = []
    overrides: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        (overrides if word.startswith("++") else own_arguments).append(word)
        if word.startswith("++") and "=" not in word and words and not _is_key(words[0]):
            overrides.append(words.pop(0))
    return own_arguments, overrides


def _is_key(word: str) -> bool:
    """Whether a word begins the next pair instead of being a value."""
    return word.startswith("++") and not word.startswith("+++")


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors explain how to write keys of a config.

    Attributes:
        instead: of other programs' options of the same purpose, ours.
        otherwise: how such a program's other options are written; None: this command has nothing to do with one.
    """

    instead: Mapping[str, str] = MappingProxyType({})
    otherwise: str | None = None

    def error(self, message: str) -> NoReturn:
        """Print the error, with the right spelling of an argument that looks like a key, and end the program."""
        _, _, unknown = message.partition("unrecognized arguments: ")
        word, *more = unknown.split()[:2] or [""]
        name, assigned, value = word.lstrip("-+").partition("=")
        name = name.replace("-", "_")
        options = [option for action in self._actions for option in action.option_strings]
        close = get_close_matches(word, options, n=1, cutoff=0.8)
        value = value if assigned or not more else more[0]
        if word in self.instead:
            message += f" (did you mean {self.instead[word]}?)"
        elif close:
            message += f" (did you mean {close[0]}?)"
        elif name.isidentifier() and "++" in (self.usage or ""):
            message += f" (a key of a config is written {_as_key(name, value)}"
            message += ")" if self.otherwise is None else f", {self.otherwise.format(word.partition('=')[0], value or 'VALUE')})"
        super().error(message)


STATUSES = """\
exit status
  0    done
  1    a crash: a traceback was printed
  2    a mistake in the command, the config or the data, which the message names
  130  interrupted with Ctrl-C"""
"""For commands that have no others."""


def command_parser(name: str, description: str, epilog: str, usage: str | None = None) -> CommandParser:
    """A parser for the options of the command `python -m hvdtrain NAME`. Line breaks in the texts are kept.

    Args:
        usage: None: generated from the options.
    """
    return CommandParser(
        prog=f"python -m hvdtrain {name}",
        usage=usage,
        description=description,
        epilog=epilog if "exit status" in epilog else f"{epilog}\n\n{STATUSES}".strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")
"""The argument that torch.distributed.launch adds without --use_env. The environment has the same information."""


def without_local_rank(arguments: list[str]) -> list[str]:
    """The arguments without the one that torch.distributed.launch adds.

    >>> without_local_rank(["--local-rank=1", "config.py"])
    ['config.py']
    """
    return [argument for argument in arguments if not LOCAL_RANK.fullmatch(argument)]
