"""The command help: explains a key, a dataset class, a topic or a command; `--help` prints its first page."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator

from hvdtrain.config.check import describe, did_you_mean
from hvdtrain.config.foreign import ALIASES, TRANSLATIONS
from hvdtrain.config.keys import Key, declared_keys
from hvdtrain.config.plugins import synonym
from hvdtrain.errors import LaunchError, Problem
from hvdtrain.settings import DATASET_SECTIONS, DICTS, SECTIONS

FIRST_KEYS = (
    "model", "backend", "train", "dev", "get_model", "train_step", "num_epochs", "batch_size", "optimizer", "learning_rate",
)  # fmt: skip
"""The keys that nearly every config sets."""

USAGE = """\
usage: python -m hvdtrain help [KEY | TOPIC | COMMAND | all]

Explain a key of a config, all keys of a topic, or a command. `all` lists every key.
"""

STATUSES = """\
exit statuses of all commands (docs/resuming.md):
  0    done
  1    a crash: a traceback was printed
  2    a mistake in the config, the command or the data, which the message names
  75   stopped early, with a checkpoint: the same command continues
  130  interrupted with Ctrl-C
"""

MOST = 4
"""The most keys that a suggestion names."""

WIDEST = 110
"""Columns: longer lines are hard to read."""


def main(arguments: list[str]) -> int:
    """Explain what the arguments name; return the exit status: 0, or 2 if there is no such thing.

    Args:
        arguments: the words after `help`, at least one, and none of them a command's name.
    """
    if {"-h", "--help"} & set(arguments):
        show(USAGE)
        return 0
    pages = []
    for word in arguments:
        try:
            pages.append(explanation(word))
        except LaunchError as error:
            print(f"hvdtrain help: error: {error}", file=sys.stderr)
            return 2
    show("\n".join(pages))
    return 0


def show(text: str) -> None:
    """Print a text, page by page on a terminal."""
    if sys.stdout.isatty() and text.count("\n") >= shutil.get_terminal_size().lines:
        import pydoc  # here: it imports many modules, and few calls need it

        pydoc.pager(text)
    else:
        print(text, end="")


def first_page(usage: str) -> str:
    """The program's usage, the keys that nearly every config sets, the topics, and the exit statuses."""
    keys = {key.name: key for section in SECTIONS for key in declared_keys(section)}
    lines = [usage, "keys that nearly every config sets (python -m hvdtrain help KEY, or help all):"]
    for name in FIRST_KEYS:
        lines += _wrap(keys[name].doc, f"  {name:15}  ", " " * 19)
    lines += ["", "topics (python -m hvdtrain help TOPIC):", *_wrap(", ".join(_topics()), "  ", "  "), "", STATUSES]
    return "\n".join(lines)


def explanation(word: str) -> str:
    """The text about a key, a topic or a class of dataset; "all": about every key.

    Raises:
        LaunchError: there is no such thing. The message names similar ones, and the keys whose name or description has the word.
    """
    name = word.removeprefix("++")
    if name == "all":
        return "\n".join(_section_text(section) for section in _sections())
    topics = _topics()
    meant_keys = [(section, key) for section in _sections() for key in declared_keys(section) if _is_meant(name, section, key)]
    if meant_keys:
        return "\n".join(_key_text(section, key) for section, key in meant_keys)
    if name.lower() in topics:
        return _section_text(topics[name.lower()])
    for explanation in filter(None, (each.explain(name) for each in TRANSLATIONS.values())):
        return "\n".join([name, *_wrap(explanation, "    ", "    ")]) + "\n"
    names = [key.name for section in _sections() for key in declared_keys(section)]
    about = [key.name for section in _sections() for key in declared_keys(section) if _mentions(key.doc, name)]
    containing = [key_name for key_name in dict.fromkeys(names) if len(name) > 2 and name.lower() in key_name.lower()]
    about = [key_name for key_name in about if key_name not in containing]
    meant = did_you_mean(name, containing) or did_you_mean(name, [*names, *topics])
    if containing and not did_you_mean(name, containing):
        more = f" {len(containing) - MOST} more have it in their names" if len(containing) > MOST else ""
        meant = f" (did you mean {' or '.join(containing[:MOST])}?{more})"
    if (here := synonym(name)) is not None:
        meant = f" (here, it is {here})"
    hint = f"; the descriptions of these keys have it: {', '.join(dict.fromkeys(about))}" if about else ""
    raise LaunchError(f"{word}: expected a key, a topic or a command, got none of them{meant}{hint}")


def anchor(section: type, key: Key) -> str:
    """The anchor of a key in docs/keys.md: its name, after that of the dict or of the class of dataset that it is in.

    >>> sections = [SECTIONS[0], DATASET_SECTIONS[0], DICTS["torch_distributed"]]
    >>> [anchor(section, declared_keys(section)[0]) for section in sections]
    ['task', 'HDFDataset.files', 'torch_distributed.backend']
    """
    outer = _outer(section)
    return key.name if outer is None else f"{outer}.{key.name}"


def _outer(section: type) -> str | None:
    """The dict or the class that the keys of a section are in; None: they are keys of a config."""
    of_class = re.search(r'"class": "(\w+)"', _title(section))
    outer = next((name for name, keys in DICTS.items() if keys is section), of_class[1] if of_class else None)
    return "dataset" if outer is None and section in DATASET_SECTIONS else outer


def pointer(problems: Iterable[Problem]) -> str:
    """A line about where to read more on the keys of some problems; empty if no key is declared.

    >>> pointer(Problem.of("out-of-range", f"{key}: ...") for key in ("max_seqs", "nothing", "train.dataset.files"))
    '\\npython -m hvdtrain help max_seqs explains the key, and docs/messages.md the message'
    """
    declared = {name for section in SECTIONS for key in declared_keys(section) for name in key.names}
    keys = [key for key in dict.fromkeys(problem.key for problem in problems) if key in declared][:3]
    words = "the key, and docs/messages.md the message" if len(keys) == 1 else "the keys, and docs/messages.md the messages"
    return f"\npython -m hvdtrain help {' '.join(keys)} explains {words}" if keys else ""


def _is_meant(name: str, section: type, key: Key) -> bool:
    """Whether a section's key has this name: `seq_ordering`, `train.seq_ordering`, `MapDataset.num_workers`,
    `torch_distributed.backend`, or an alias.
    """
    outer, _, entry = name.rpartition(".")
    if outer in ("train", "dev", "eval"):
        return section in DATASET_SECTIONS and entry in key.names
    return name in key.names or ALIASES.get(name) == key.name or (outer != "" and outer == _outer(section) and entry in key.names)


def _mentions(doc: str, word: str) -> bool:
    return len(word) > 2 and re.search(rf"\b{re.escape(word)}", doc, re.IGNORECASE) is not None


def _sections() -> Iterator[type]:
    yield from SECTIONS
    yield from DICTS.values()
    yield from DATASET_SECTIONS


def _topics() -> dict[str, type]:
    """The sections by their names in small letters: those of datasets are their classes.

    >>> "batch" in _topics(), "hdfdataset" in _topics()
    (True, True)
    """
    return {section.__name__.removesuffix("Keys").lower(): section for section in _sections()}


def _section_text(section: type) -> str:
    lines = [*_wrap(_title(section), "", ""), ""]
    for key in declared_keys(section):
        lines += _wrap(", ".join(key.names), "    ", "    ")
        lines += _wrap(key.doc, "        ", "        ")
        lines += _wrap(f"({describe(key)})", "        ", "        ")
    return "\n".join(lines) + "\n"


def _key_text(section: type, key: Key) -> str:
    outer = _outer(section)
    prefix = f"{outer}." if outer not in (None, "dataset") and "." not in key.name else ""
    names = [*key.names[1:], *(alias for alias, name in ALIASES.items() if name == key.name)]
    lines = [", ".join(dict.fromkeys([f"{prefix}{key.name}", *names]))]
    for text in (key.doc, describe(key)):
        lines += _wrap(text, "    ", "    ")
    lines += _wrap(f"topic {section.__name__.removesuffix('Keys').lower()}: {_title(section)}", "    ", "    ")
    lines.append(f"    docs/keys.md#{anchor(section, key)}")
    return "\n".join(lines) + "\n"


def _title(section: type) -> str:
    return (section.__doc__ or "").splitlines()[0]


def _wrap(text: str, first: str, later: str) -> Iterable[str]:
    """The lines of a text, as wide as the terminal."""
    width = min(WIDEST, shutil.get_terminal_size().columns)
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
