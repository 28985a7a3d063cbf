"""What a run leaves for the comparison: losses, learning rates, and sketches of gradients and weights, step by step.

A sketch of a tensor is `SKETCH` numbers, each the sum of a part of its elements with random signs that are the same in every run
(a count sketch: Charikar et al., 2002). It is linear, so the norm of the difference of two sketches estimates the norm of the
difference of the tensors, within about 9 % (one standard deviation); for tensors of up to `SKETCH` elements it is exact. All
updates of a large model thus fit into some megabytes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.data.types import Array, Batch

SKETCH = 256
"""Numbers in a sketch. The relative error of an estimated norm is about sqrt(1 / (2 * SKETCH)) to sqrt(2 / SKETCH)."""


def sketch(values: Array) -> Array:
    """The sketch of a tensor, float64 of shape (SKETCH,)."""
    flat = values.reshape(-1).astype(numpy.float64)
    padded = numpy.zeros(max(1, -(-flat.size // SKETCH)) * SKETCH)
    padded[: flat.size] = flat * signs(flat.size)
    result: Array = padded.reshape(-1, SKETCH).sum(axis=0)
    return result


@cache
def signs(count: int) -> Array:
    """N random signs, the same in every process; int8."""
    return numpy.random.default_rng(0).integers(0, 2, count, dtype=numpy.int8) * 2 - 1


def checksum(batch: Batch) -> int:
    """A checksum of a batch's sequences without their padding: the sum over all batches of a step does not depend on how its
    sequences are dealt to batches and ranks."""
    total = 0
    for key, padded in sorted(batch.data.items()):
        for sequence, length in zip(padded.values, padded.seq_lens.tolist(), strict=True):
            values = sequence[:length]
            content = repr(values.tolist()).encode() if values.dtype == object else values.tobytes()
            total += zlib.crc32(content, zlib.crc32(key.encode()))
    return total


Losses = dict[str, tuple[float, float]]
"""By name, the sum of a loss or an error over the batches of a step on all ranks, and the number of its elements."""


@dataclass(frozen=True)
class Part:
    """A part of the model that may make a rank's results depend on more than its own sequences.

    Attributes:
        kind: "statistics over a batch" or "random numbers".
        name: where it is in the model, such as `encoder.norm`.
        type: the name of its class.
    """

    kind: str
    name: str
    type: str


@dataclass(frozen=True)
class Record:
    """One run.

    Attributes:
        size: the number of ranks.
        losses: by step.
        num_sequences: by step, over all ranks.
        data: by step, `checksum` of the batches of all ranks.
        rates: the learning rate of each update.
        parts: of the model.
        apart: a parameter that is not the same on all ranks after the last update; None: all are, bit for bit.
        weights: sketches after each update, before the first one at 0, by the parameters' names; shape (updates + 1, SKETCH).
        gradients: sketches of what each update applies, reduced over the ranks, before noise and clipping; (updates, SKETCH).
        elements: the number of elements of each parameter.
    """

    size: int
    losses: list[Losses]
    num_sequences: list[int]
    data: list[int]
    rates: list[float]
    parts: list[Part]
    apart: str | None
    weights: Mapping[str, Array]
    gradients: Mapping[str, Array]
    elements: Mapping[str, int]

    def save(self, path: Path) -> None:
        """Write everything into one .npz file."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("weights", "gradients")}
        plain["parts"] = [asdict(part) for part in self.parts]
        arrays = {f"weights/{name}": values for name, values in self.weights.items()}
        arrays |= {f"gradients/{name}": values for name, values in self.gradients.items()}
        content: dict[str, Any] = {"plain": numpy.array(json.dumps(plain)), **arrays}
        with open(path, "wb") as file:
            numpy.savez(file, **content)

    @staticmethod
    def load(path: Path) -> Record:
        """Read what `save` wrote."""
        with numpy.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        plain = json.loads(str(arrays.pop("plain")))
        plain["parts"] = [Part(**part) for part in plain["parts"]]
        plain["losses"] = [{name: (total, count) for name, (total, count) in losses.items()} for losses in plain["losses"]]
        by_kind: dict[str, Any] = {"weights": {}, "gradients": {}}
        for name, values in arrays.items():
            kind, _, parameter = name.partition("/")
            by_kind[kind][parameter] = values
        return Record(**plain, **by_kind)


def summed(by_rank: Iterable[Losses]) -> Losses:
    """The losses of a step over all ranks."""
    total: Losses = {}
    for losses in by_rank:
        for name, (value, count) in losses.items():
            before = total.get(name, (0.0, 0.0))
            total[name] = before[0] + value, before[1] + count
    return total
