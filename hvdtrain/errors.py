"""Errors that a user can cause and fix. They are shown as a message without a traceback and end the program with status 2."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

TO_BE_CONTINUED = 75
"""Exit status of a training that was stopped and should be restarted: EX_TEMPFAIL of sysexits.h."""

BY_CTRL_C = 130
"""Exit status after Ctrl-C, as in shells: the training is not restarted."""


@dataclass(frozen=True)
class Outcome:
    """How a rank ends other than by success.

    Attributes:
        status: the program's exit status.
        scope: who has failed: this rank only; all ranks together, so that it is enough if one of them shows it; or another rank,
            for which this one was waiting.
        repeatable: the same would happen if the launcher started the ranks again.
    """

    status: int
    scope: Literal["this rank", "all ranks", "a peer"] = "this rank"
    repeatable: bool = True


ProblemRule = Literal[
    "missing",  # something that is needed was not given
    "unknown-key",  # no such key, entry or option
    "unknown-value",  # none of the values or names that are possible
    "wrong-type",
    "wrong-format",  # a text that is not written as it should be
    "wrong-signature",  # a function or class that cannot be called as it will be
    "wrong-result",  # what a function of the config returned or did
    "wrong-call",  # of hvdtrain's functions, at the wrong time or place
    "out-of-range",
    "duplicate",
    "conflict",  # with the value of another key
    "rank-mismatch",  # the ranks do not have the same
    "needs-backend",  # another framework is needed
    "unsupported",  # valid elsewhere, but not done by hvdtrain
    "unavailable",  # the device, compiler or transport is not there
    "missing-package",
    "cannot-import",
    "unreadable",  # a config file
    "not-writable",
    "raised",  # code of the config raised an exception
    "other",
]
"""What a problem violates, for tools and tests: these names stay, while sentences may be improved."""


class HvdtrainError(Exception):
    """Base class of the errors that a user can fix.

    Attributes:
        outcome: how a rank ends that raises it.
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
        """The same error as all ranks raise it together."""
        return self._with(outcome=replace(self.outcome, scope="all ranks"))

    def _with(self, **attributes: object) -> Self:
        """A copy with other attributes. Where the error was raised, and because of what, stays."""
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
    """Something that is wrong with a config or the command line.

    Attributes:
        key: as the user writes it, with the dict that it is in, or the place of the problem.
        expected: with `got` and `hint`, a part of the sentence; empty: it has no such part.
        sentence: what users see.
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

        >>> found = Problem.of("out-of-range", "max_seqs: expected a positive number, got 0 in g2p.py (leave it out)")
        >>> found.key, found.expected, found.got, found.hint
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


def problem(rule: ProblemRule, sentence: str) -> list[Problem]:
    """One problem, for a list of them: 'key: expected ..., got ... (hint)'."""
    return [Problem.of(rule, sentence)]


class ConfigError(HvdtrainError):
    """Problems in the config or the command line: all that were found, in one error."""

    def __init__(self, problems: Sequence[Problem | str]) -> None:
        self.problems = [Problem.of("other", found) if isinstance(found, str) else found for found in problems]
        count = len(self.problems)
        where = "options" if count and all(found.key.startswith("--") for found in self.problems) else "config"
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


class CheckpointError(HvdtrainError):
    """A checkpoint is missing, damaged or belongs to another model. The message names the file."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint's file is not as it was written, or does not belong to the other files."""


class TrainingError(HvdtrainError):
    """Training cannot continue, for instance because a loss is not finite."""


class LaunchError(HvdtrainError):
    """The processes were started in a way that does not work, or something that is needed to connect them is missing."""


class PeerFailure(HvdtrainError):
    """Another rank failed while this one was waiting for it; this rank has no error of its own to report.

    Attributes:
        seen: what this rank can see of the cause. A process that was killed, or that has called os._exit, has said nothing.
    """

    outcome = Outcome(1, "a peer", repeatable=False)
    seen: tuple[str, ...] = ()

    def having_seen(self, seen: Sequence[str]) -> Self:
        """The same error with what this rank can see of the cause."""
        return self._with(seen=tuple(seen))

    def __str__(self) -> str:
        return ": ".join([super().__str__(), *(["; ".join(self.seen)] if self.seen else [])])
