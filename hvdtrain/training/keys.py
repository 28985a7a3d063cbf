"""The keys of the task forward, keys that change with the epoch, and the value of `predict_ranks`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.config.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class ForwardKeys(Section):
    """Where the outputs of the tasks forward and search go: into a file, to a callback, or both."""

    output_file: str | None = key(None, "an HDF file for the outputs that forward_step marks; it must not exist yet")
    forward_callback: Any = key(
        None,
        "an object, or a function or class that makes one, with the methods init(*, model), process_seq(*, seq_tag, outputs) "
        "and finish(); called on rank 0, sequence by sequence in the dataset's order; in JSON 'module:name'",
    )
    search_output_file: str | None = key(
        None, "task search: a file for the texts of an output, in the dataset's order; with .gz compressed; it must not exist yet"
    )
    search_output_file_format: Literal["txt", "py"] = key(
        "txt", "txt, a line for each sequence, or py, a dict from tags to texts; several hypotheses are a list of (score, text)"
    )
    search_output_layer: str | list[str] | None = key(
        None,
        "which output goes into search_output_file; None: 'output', 'hyps', 'hyp' or the only one; a list, for the format py: "
        "several, as dicts",
    )
    search_labels: Any = key(
        None,
        "the labels of the numbers in search_output_file: a list, the name of a data key that has labels, or a function "
        "{signature} that returns the text; None: those of the data key classes or targets, or the only one that has labels",
        signature="*, name, numbers, **_",
    )


@dataclass(frozen=True, kw_only=True)
class PerEpochKeys(Section):
    """Keys that change with the epoch."""

    keys_of_epoch: Callable[..., Any] | str | None = key(
        None,
        "function {signature} that returns a dict of the keys that have another value in this epoch: those of batches, chunks "
        "and accumulation, learning_rate, and train, dev, eval and eval_datasets (docs/training.md)",
        signature="*, epoch, **_",
    )


@dataclass(frozen=True)
class Placement:
    """A number of ranks, and how many of them are on each host; None: as many as in the measurement."""

    ranks: int
    per_host: int | None = None

    def __str__(self) -> str:
        return str(self.ranks) if self.per_host is None else f"{self.ranks}:{self.per_host}"


def parse_placements(value: Any) -> list[Placement]:
    """Parse the key `predict_ranks`: 8, (2, 8), '2,8,64:4' (64 ranks, 4 on each host). Raises: ValueError, TypeError.

    >>> [str(placement) for placement in parse_placements("2, 8,64:4")], parse_placements((2, 8)) == parse_placements("2,8")
    (['2', '8', '64:4'], True)
    """
    parts = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else [value]
    placements = []
    for part in parts:
        found = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", str(part).strip())
        if found is None or isinstance(part, bool):
            raise ValueError(value)
        placements.append(Placement(int(found[1]), int(found[2]) if found[2] else None))
    if not placements:
        raise ValueError(value)
    return placements
