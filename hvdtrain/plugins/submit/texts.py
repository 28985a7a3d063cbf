"""Checks of a job's texts, which come from a command line and are inserted into scripts, schedulers' options and YAML."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence

from hvdtrain.errors import Problem, problem

FORBIDDEN_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories that no text may contain: control characters, such as line ends; bytes that are not UTF-8; Unicode's
other line ends."""

NOT_IN_OPTIONS = "\"'\\`#"
"""Characters that schedulers interpret differently in the comments with their options: quotes and comment signs."""

FORMATS = {
    "--name": (r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", "letters, digits and any of _.+-"),
    "--hosts": (r"[A-Za-z0-9_][A-Za-z0-9_.-]*", "names of hosts"),
    "--interface": (r"[\^=]?[A-Za-z0-9_][A-Za-z0-9_.:@,-]*", "names of network interfaces, such as eth0, ib0,ib1 or ^docker"),
    "--export": (r"[A-Za-z_][A-Za-z0-9_]*(=.*)?", "the name of a variable, or NAME=VALUE"),
    "--parallel-environment": (r"[A-Za-z0-9_*?][A-Za-z0-9_.*?+-]*", "the name of a parallel environment"),
}
"""The pattern of each option that has one, and its description."""


def text_problems(texts: Mapping[str, Sequence[str]], in_options: Sequence[str]) -> list[Problem]:
    """Problems with the values of the command line.

    Args:
        texts: values by the name of their option.
        in_options: the options that a scheduler reads from a comment.

    >>> for problem in text_problems({"--name": ["a b"], "++layers": ["[1,\\n2]"]}, ["--name"]):
    ...     print(problem)
    --name: expected letters, digits and any of _.+-, got 'a b'
    ++layers: expected one line without control characters, got '[1,\\n2]'
    """
    problems = []
    for name, values in texts.items():
        for value in values:
            pattern, rule = FORMATS[name] if name in FORMATS and (name != "--name" or name in in_options) else (".*", "")
            if has_forbidden_characters(value):
                problems += problem("wrong-format", f"{name}: expected one line without control characters, got {value!r}")
            elif not re.fullmatch(pattern, value):
                problems += problem("wrong-format", f"{name}: expected {rule}, got {value!r}")
            elif name in in_options and (value.startswith("-") or not value.strip() or set(value) & set(NOT_IN_OPTIONS)):
                problems += problem(
                    "wrong-format", f"{name}: expected no quotes, backslashes or # and no - at the beginning, got {value!r}"
                )
    return problems


def has_forbidden_characters(text: str) -> bool:
    """Whether a text contains line ends or characters that a text file must not contain.

    >>> [has_forbidden_characters(text) for text in ("a b's $HOME: größer", "a\\nb", "\\udcff", "\\ufffe")]
    [False, True, True, True]
    """
    return any(unicodedata.category(letter) in FORBIDDEN_CATEGORIES or ord(letter) & 0xFFFE == 0xFFFE for letter in text)


def option_text(text: str) -> str:
    """A value in a comment with a scheduler's options, in double quotes (which all schedulers know) if it has spaces or the like.

    >>> option_text("logs/a-%j.out"), option_text("my logs/a")
    ('logs/a-%j.out', '"my logs/a"')
    """
    return text if re.fullmatch(r"[\w@%+=:,./$*?\[\]-]+", text) else f'"{text}"'
