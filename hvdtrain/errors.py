"""Errors that a user can cause and fix. They are shown as a message without a traceback and end the program with status 2."""

from __future__ import annotations

from collections.abc import Sequence


class HvdtrainError(Exception):
    """Base class of the errors that a user can fix.

    Attributes:
        on_every_rank: all ranks raise the same error together, so that it is enough if one of them shows it.
        status: the program's exit status.
        would_repeat: the same would happen if the launcher started the ranks again.
        is_printed: the user has seen it.
    """

    on_every_rank = False
    status = 2
    would_repeat = True
    is_printed = False

    def of_rank(self, rank: int) -> HvdtrainError:
        """The same error with the rank in its message, for an error that only this rank has."""
        return type(self)(f"rank {rank}: {self}")


class ConfigError(HvdtrainError):
    """Problems in the config or the command line: all that were found, in one error."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        where = "options" if count and all(problem.startswith("--") for problem in self.problems) else "config"
        super().__init__("\n  ".join([f"{count} problem{'' if count == 1 else 's'} in the {where}:", *self.problems]))

    def of_rank(self, rank: int) -> ConfigError:
        return ConfigError([f"rank {rank}: {self}"])

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.problems,)  # pickled when it is sent to other ranks


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

    status = 1
    would_repeat = False
    seen: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ": ".join([super().__str__(), *(["; ".join(self.seen)] if self.seen else [])])
