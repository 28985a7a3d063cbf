"""What a config's functions marked: losses and outputs, checked and counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.context import Loss, Output
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError

TINY = 1e-30
"""The smallest divisor of a sum: if no element was counted, the sum is zero, too."""


@dataclass(frozen=True)
class Normalized:
    """The losses of a train_step that are divided by their number of elements (use_normalized_loss).

    Attributes:
        alone: whether such a loss is the only one that is minimized. Its gradients can be divided after the reduction.
    """

    names: tuple[str, ...]
    alone: bool


def normalized(losses: Mapping[str, Loss]) -> Normalized:
    """The losses that are to be normalized."""
    wanted = minimized(losses)
    names = tuple(name for name, loss in wanted.items() if loss.use_normalized_loss)
    return Normalized(names, alone=len(wanted) == 1)


def minimized(losses: Mapping[str, Loss]) -> dict[str, Loss]:
    """The losses that are minimized: those that are no errors and have a scale."""
    return {name: loss for name, loss in losses.items() if not loss.as_error and loss.scale != 0}


def check_marked(losses: Mapping[str, Loss]) -> None:
    """Raises: ConfigError, if train_step marked nothing."""
    if not losses:
        raise ConfigError(["train_step: expected a call of hvdtrain.get_run_ctx().mark_as_loss(...), got none"])


def check_same(first: Normalized, own: Normalized) -> None:
    """Raises: ConfigError, if a step has other normalized losses than the first step."""
    if own != first:
        raise ConfigError([f"train_step: expected losses with use_normalized_loss as in the first step, {first}, got {own}"])


def nothing_to_minimize() -> ConfigError:
    """The error if no marked loss depends on a parameter."""
    return ConfigError(["train_step: expected a loss that depends on the model's parameters, got only errors or constants"])


def check_outputs(outputs: Mapping[str, Output]) -> None:
    """Raises: ConfigError, if forward_step marked nothing."""
    if not outputs:
        raise ConfigError(["forward_step: expected a call of hvdtrain.get_run_ctx().mark_as_output(...), got none"])


class Outputs(dict[str, Array]):
    """The outputs of a sequence by name.

    Attributes:
        vectors: the names of those that are the features of the whole sequence, shape (features,), and have no axis of frames.
    """

    def __init__(self, vectors: frozenset[str]) -> None:
        super().__init__()
        self.vectors = vectors


def by_sequence(
    outputs: Mapping[str, tuple[Sequence[Array], Sequence[int] | None]], count: int, vectors: frozenset[str] = frozenset()
) -> list[Outputs]:
    """The outputs of each sequence of a batch by name, without padding.

    Args:
        outputs: by name, one row for each sequence, and the number of the row's frames that belong to it; None: all of them.
        count: the number of sequences in the batch.
        vectors: as of `Outputs`.

    Raises:
        ConfigError: an output has another number of rows.
    """
    sequences = [Outputs(vectors) for _ in range(count)]
    for name, (rows, seq_lens) in outputs.items():
        lengths: Sequence[int | None] = [None] * len(rows) if seq_lens is None else seq_lens
        if not len(rows) == len(lengths) == count:
            raise ConfigError([f"forward_step: expected an entry of {name} for each of {count} sequences, got {len(rows)}"])
        for sequence, row, length in zip(sequences, rows, lengths, strict=True):
            sequence[name] = row[:length] if row.ndim else row
    return sequences
