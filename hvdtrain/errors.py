"""Errors that a user can cause and fix. They are shown as a message without a traceback and end the program with status 2."""

from __future__ import annotations

import copy
import os
import re
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

TO_BE_CONTINUED = 75
"""Exit status of a training that was stopped and should be restarted: EX_TEMPFAIL of sysexits.h."""

BY_CTRL_C = 130
"""Exit status after Ctrl-C, as in shells: the training is not restarted."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""They stop a training with a checkpoint. They reach all its processes; those that are no ranks ignore them."""


@dataclass(frozen=True)
class Outcome:
    """How a rank that does not succeed ends.

    Attributes:
        status: the program's exit status.
        scope: what failed: only this rank; all ranks together, so that one of them prints it; or another rank, which this one was
            waiting for.
        repeatable: it would happen again if the launcher restarted the ranks.
    """

    status: int
    scope: Literal["this rank", "all ranks", "a peer"] = "this rank"
    repeatable: bool = True


ProblemRule = Literal[
    "missing",  # a required value was not given
    "unknown-key",  # no such key, entry or option
    "unknown-value",  # none of the possible values or names
    "wrong-type",
    "wrong-format",  # a string with the wrong syntax
    "wrong-signature",  # a function or class that cannot be called with the arguments it will get
    "wrong-result",  # returned by a function of the config
    "wrong-call",  # a call of hvdtrain at the wrong time or place
    "out-of-range",
    "duplicate",
    "conflict",  # with the value of another key
    "rank-mismatch",  # the ranks have different values
    "needs-backend",  # another framework is needed
    "unsupported",  # valid elsewhere, but not in hvdtrain
    "unavailable",  # a missing device, compiler or transport
    "missing-package",
    "cannot-import",
    "unreadable",  # a config file
    "not-writable",
    "raised",  # code of the config raised an exception
    "other",
]
"""The rule that a problem violates, for tools and tests: these names are stable, while sentences may be improved."""


class HvdtrainError(Exception):
    """Base class of the errors that a user can fix.

    Attributes:
        outcome: how a rank that raises it ends.
    """

    outcome = Outcome(2)

    @property
    def status(self) -> int:
        """The program's exit status."""
        return self.outcome.status

    @property
    def on_every_rank(self) -> bool:
        """Whether all ranks raise it together."""
        return self.outcome.scope == "all ranks"

    def of_rank(self, rank: int) -> HvdtrainError:
        """The same error with the rank in its message, for an error that only this rank has."""
        return type(self)(f"rank {rank}: {self}")

    def on_all_ranks(self) -> Self:
        """The same error, as raised by all ranks together."""
        return self._with(outcome=replace(self.outcome, scope="all ranks"))

    def _with(self, **attributes: object) -> Self:
        """A copy with other attributes, but the same traceback and cause."""
        error = copy.copy(self)
        vars(error).update(attributes)
        error.__cause__ = self.__cause__
        error.__suppress_context__ = self.__suppress_context__
        return error.with_traceback(self.__traceback__)


SENTENCE = re.compile(
    r"(?:(?P<key>.*?): )?(?:expected (?P<expected>.*?), got:? (?P<got>.*?)|.*?)(?: \((?P<hint>.*)\))?", re.DOTALL
)


@dataclass(frozen=True)
class Problem:
    """A problem with a config or the command line.

    Attributes:
        key: the key as the user writes it, with the dict that it is in; or the place of the problem.
        expected, got, hint: parts of the sentence; empty: the sentence has no such part.
        sentence: the text that users see.
    """

    key: str
    rule: ProblemRule
    expected: str
    got: str
    hint: str
    sentence: str

    @classmethod
    def of(cls, rule: ProblemRule, sentence: str) -> Problem:
        """A problem by its sentence.

        >>> mistake = Problem.of("out-of-range", "max_seqs: expected a positive number, got 0 in g2p.py (leave it out)")
        >>> mistake.key, mistake.expected, mistake.got, mistake.hint
        ('max_seqs', 'a positive number', '0 in g2p.py', 'leave it out')
        """
        parts = SENTENCE.fullmatch(sentence)
        return cls(rule=rule, sentence=sentence, **(parts.groupdict(default="") if parts else {}))

    def __str__(self) -> str:
        return self.sentence

    def __repr__(self) -> str:
        return f"Problem.of({self.rule!r}, {self.sentence!r})"

    def within(self, where: str) -> Problem:
        """The same problem with a key that begins with `where`, such as 'train.'."""
        return Problem.of(self.rule, where + self.sentence)

    def with_hint(self, text: str) -> Problem:
        """The same problem with one more hint, behind the one that it has."""
        before = f"{self.sentence[:-1]}; " if self.hint else f"{self.sentence} ("
        return Problem.of(self.rule, f"{before}{text})")


def first_few(names: Sequence[str], most: int) -> str:
    """The first few of several names.

    >>> first_few(["a", "b", "c"], 3), first_few(["a", "b", "c", "d"], 2)
    ('a, b, c', 'a, b and 2 more')
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def raised_text(error: BaseException) -> str:
    """An exception of another library as text, with the place that raised it: an assertion often has no message."""
    raised_at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}{f': {error}' if str(error) else ''} in {raised_at.filename}, line {raised_at.lineno}"


def problem(rule: ProblemRule, sentence: str) -> list[Problem]:
    """One problem, for a list of them: 'key: expected ..., got ... (hint)'."""
    return [Problem.of(rule, sentence)]


class ConfigError(HvdtrainError):
    """Problems in the config or the command line: all that were found, in one error."""

    def __init__(self, problems: Sequence[Problem | str]) -> None:
        self.problems = [Problem.of("other", problem) if isinstance(problem, str) else problem for problem in problems]
        count = len(self.problems)
        where = "options" if count and all(problem.key.startswith("--") for problem in self.problems) else "config"
        super().__init__("\n  ".join([f"{count} problem{'' if count == 1 else 's'} in the {where}:", *map(str, self.problems)]))

    @classmethod
    def of(cls, rule: ProblemRule, sentence: str) -> ConfigError:
        """One problem: 'key: expected ..., got ... (hint)'."""
        return cls(problem(rule, sentence))

    def of_rank(self, rank: int) -> ConfigError:
        return ConfigError.of("other", f"rank {rank}: {self}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Problem]], dict[str, object]]:
        return type(self), (self.problems,), vars(self)  # pickled when it is sent to other ranks


class DataError(HvdtrainError):
    """A dataset's file is missing or malformed. The message names the file."""


class BrokenSequence(DataError):
    """A sequence cannot be read, while others of the dataset can. The message names its file and the sequence.

    The key `skip_broken` lets a training continue without some of them.
    """


class CheckpointError(HvdtrainError):
    """A checkpoint is missing, damaged or belongs to another model. The message names the file."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint's file was changed, or does not belong to the other files."""


class TrainingError(HvdtrainError):
    """Training cannot continue, for instance because a loss is not finite."""


class LaunchError(HvdtrainError):
    """The processes were started in a way that does not work, or something required to connect them is missing."""


class PeerFailure(HvdtrainError):
    """Another rank failed while this one was waiting for it; this rank itself did not fail.

    Attributes:
        causes: possible causes that this rank can see. A process that was killed, or that called os._exit, has reported none.
    """

    outcome = Outcome(1, "a peer", repeatable=False)
    causes: tuple[str, ...] = ()

    def with_causes(self, causes: Sequence[str]) -> Self:
        """The same error with the causes that this rank can see."""
        return self._with(causes=tuple(causes))

    def __str__(self) -> str:
        return ": ".join([super().__str__(), *(["; ".join(self.causes)] if self.causes else [])])


def prunes(error: BaseException) -> bool:
    """Whether it is the error by which Optuna's users end a trial whose scores are of interest."""
    return type(error).__name__ == "TrialPruned"


PACKAGE = f'  File "{os.path.dirname(os.path.abspath(__file__))}{os.sep}'


def failure_text(error: BaseException) -> str:
    """An exception of the user's code, for the terminal: what it says and in which batch, then its traceback, which has one line
    for the calls within hvdtrain that lead to other code.
    """
    if (rank := getattr(error, TOLD_BY, None)) is not None:
        return f"{_first_line(error)} (as on {rank}, which prints more)\n"
    lines: list[str] = []
    inside: list[str] = []
    for line in traceback.format_exception(error):
        is_frame = line.startswith("  File ")
        if is_frame and line.startswith(PACKAGE):
            inside.append(line)
            continue
        lines += (
            [f"  ({len(inside)} calls within hvdtrain, the last one in {_place(inside[-1])})\n"]
            if inside and is_frame
            else inside
        )
        inside = []
        lines.append(line)
    said = traceback.format_exception_only(error)
    stack = [*lines, *inside]
    return "".join([*said, *stack[: len(stack) - len(said)], f"{_first_line(error)}\n"])


TOLD_BY = "told_by"
"""The attribute of an exception that another rank has, too: that rank."""


def _first_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[0].partition("\n")[0]


def _place(frame: str) -> str:
    file, _, after_file = frame.removeprefix(PACKAGE).partition('", line ')
    return f"{file}:{after_file.partition(',')[0]}"
