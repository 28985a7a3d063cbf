"""What a config's forward_step marks, sequence by sequence, whatever the framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdtrain.context import Output
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError


def check_outputs(outputs: Mapping[str, Output]) -> None:
    """Raises: ConfigError, if forward_step marked nothing."""
    if not outputs:
        raise ConfigError(["forward_step: expected a call of hvdtrain.get_run_ctx().mark_as_output(...), got none"])


def by_sequence(outputs: Mapping[str, tuple[Sequence[Array], Sequence[int] | None]], count: int) -> list[dict[str, Array]]:
    """A batch's outputs by name for each of its sequences, without padding.

    Args:
        outputs: by name, a row for every sequence, and how much of each row belongs to it; None: all of it.
        count: how many sequences the batch has.

    Raises:
        ConfigError: an output has more or fewer rows.
    """
    sequences: list[dict[str, Array]] = [{} for _ in range(count)]
    for name, (rows, seq_lens) in outputs.items():
        lengths: Sequence[int | None] = [None] * len(rows) if seq_lens is None else seq_lens
        if not len(rows) == len(lengths) == count:
            raise ConfigError([f"forward_step: expected an entry of {name} for each of {count} sequences, got {len(rows)}"])
        for sequence, row, length in zip(sequences, rows, lengths, strict=True):
            sequence[name] = row[:length] if row.ndim else row
    return sequences
