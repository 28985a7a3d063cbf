"""What the texts of a job may be, which come from a command line and end up in scripts, in schedulers' options and in YAML."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence

from hvdtrain.errors import Problem, problem

UNSEEN = ("Cc", "Cs", "Zl", "Zp")
"""Categories of characters that no text may have: control characters, such as the end of a line; bytes that are not UTF-8;
Unicode's own ends of lines."""

NOT_IN_OPTIONS = "\"'\\`#"
"""What schedulers read in different ways in the comments with their options: quotes, and what begins a comment."""

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
INTERFACE = re.compile(r"[\^=]?[A-Za-z0-9_][A-Za-z0-9_.:@,-]*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(=.*)?")
ENVIRONMENT = re.compile(r"[A-Za-z0-9_*?][A-Za-z0-9_.*?+-]*")

FORMS = {
    "--name": (NAME, "letters, digits and any of _.+-"),
    "--hosts": (HOST, "names of hosts"),
    "--interface": (INTERFACE, "names of network interfaces, such as eth0, ib0,ib1 or ^docker"),
    "--export": (VARIABLE, "the name of a variable, or NAME=VALUE"),
    "--parallel-environment": (ENVIRONMENT, "the name of a parallel environment"),
}
"""What has a form of its own, by option."""


def problems_of(texts: Mapping[str, Sequence[str]], in_options: Sequence[str]) -> list[Problem]:
    """What is wrong with the values of the command line.

    Args:
        texts: values by the name of their option.
        in_options: the names of those that a scheduler reads from a comment.

    >>> for problem in problems_of({"--name": ["a b"], "++layers": ["[1,\\n2]"]}, ["--name"]):
    ...     print(problem)
    --name: expected letters, digits and any of _.+-, got 'a b'
    ++layers: expected one line without control characters, got '[1,\\n2]'
    """
    problems = []
    for name, values in texts.items():
        for value in values:
            form, rule = FORMS.get(name, (None, "")) if name != "--name" or name in in_options else (None, "")
            if has_unseen(value):
                problems += problem("wrong-format", f"{name}: expected one line without control characters, got {value!r}")
            elif form is not None and not form.fullmatch(value):
                problems += problem("wrong-format", f"{name}: expected {rule}, got {value!r}")
            elif name in in_options and (value.startswith("-") or not value.strip() or set(value) & set(NOT_IN_OPTIONS)):
                problems += problem(
                    "wrong-format", f"{name}: expected no quotes, backslashes or # and no - at the beginning, got {value!r}"
                )
    return problems


def has_unseen(text: str) -> bool:
    """Whether a text has characters that end a line, or that no file of text may have.

    >>> has_unseen("a b's $HOME: größer"), has_unseen("a\\nb"), has_unseen("\\udcff"), has_unseen("\\ufffe")
    (False, True, True, True)
    """
    return any(unicodedata.category(letter) in UNSEEN or ord(letter) & 0xFFFE == 0xFFFE for letter in text)


def option_text(text: str) -> str:
    """A value in a comment with a scheduler's options: in double quotes where it has spaces or the like. All of them know these.

    >>> option_text("logs/a-%j.out"), option_text("my logs/a")
    ('logs/a-%j.out', '"my logs/a"')
    """
    return text if re.fullmatch(r"[\w@%+=:,./$*?\[\]-]+", text) else f'"{text}"'
