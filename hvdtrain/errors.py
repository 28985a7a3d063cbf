"""The errors a user can cause and mend. They are shown as a message without a traceback, and end the program with 2."""

from __future__ import annotations

from collections.abc import Sequence


class HvdtrainError(Exception):
    """Something a user can mend.

    Attributes:
        on_every_rank: all ranks raised the same error together, so one of them is enough to show it.
        status: the program's exit status.
    """

    on_every_rank = False
    status = 2

    def of_rank(self, rank: int) -> HvdtrainError:
        """The same error, telling that only this rank saw it."""
        return type(self)(f"rank {rank}: {self}")


class ConfigError(HvdtrainError):
    """The config or the command line: every problem found, in one error."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        head = "1 problem in the config:" if count == 1 else f"{count} problems in the config:"
        super().__init__("\n  ".join([head, *self.problems]))

    def of_rank(self, rank: int) -> ConfigError:
        return ConfigError([f"rank {rank}: {self}"])

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.problems,)  # pickled on its way to other ranks


class DataError(HvdtrainError):
    """A dataset's file or what is in it. The message names the file."""


class CheckpointError(HvdtrainError):
    """A checkpoint that is missing, damaged or of another model. The message names the file."""


class TrainingError(HvdtrainError):
    """A training that cannot go on: a loss is no number."""


class LaunchError(HvdtrainError):
    """How the processes were started, or what is installed to connect them."""


class PeerFailure(HvdtrainError):
    """Another rank failed: this one was waiting for it and has nothing to report of its own."""

    status = 1
