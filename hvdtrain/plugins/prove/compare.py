"""The record of a run, and how far two runs agree.

A `Record` has losses, learning rates, and sketches of gradients and weights, step by step. `compare` determines to which digit
two records agree, and the first step and the first parameter that differ.

A sketch of a tensor is `SKETCH` numbers, each the sum of a part of its elements with random signs that are the same in every run
(a count sketch: Charikar et al., 2002). It is linear, so the norm of the difference of two sketches estimates the norm of the
difference of the tensors, within about 9 % (one standard deviation); for tensors of up to `SKETCH` elements it is exact. So all
updates of a large model fit into a few megabytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import floor, inf, isfinite, isnan, log10, sqrt

import numpy

from hvdtrain.data.types import Array, Batch, Items, arrays_in

SKETCH = 256
"""The size of a sketch. The relative error of an estimated norm is about sqrt(1 / (2 * SKETCH)) to sqrt(2 / SKETCH)."""

LEAST_GRADIENT = 0.1
"""A parameter's gradient is compared relative to its norm, or to this share of the model's typical gradient if that is larger:
gradients that cancel out (the bias before a normalization, the bias of attention's keys) are only rounding errors."""

LEAST_WEIGHT = 1e-3
"""The same for weights, as a bias begins at zero."""

ROUNDING = 1e-4
"""A gradient that is below this share of the model's typical one in every update is only a rounding error. Adam makes full steps
of it, so such weights differ from run to run, but no loss depends on them."""

MOST_DIGITS = 7
"""The digits of float32."""


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
    """A checksum of a batch's sequences without their padding. Its sum over all batches of a step does not depend on how the
    sequences are distributed over batches and ranks."""
    total = 0
    for key, padded in sorted(batch.data.items()):
        if batch.joined is None:
            sequences = padded.sequences()
        else:
            sequences = numpy.split(padded.values[0], numpy.cumsum(batch.joined)[:-1])
        for values in sequences:
            if isinstance(padded, Items):
                content = b"".join(array.tobytes() for array in arrays_in(values[0]))
            else:
                content = repr(values.tolist()).encode() if values.dtype == object else values.tobytes()
            total += zlib.crc32(content, zlib.crc32(key.encode()))
    return total


Losses = dict[str, tuple[float, float]]
"""By name, the sum of a loss or an error over the batches of a step on all ranks, and the number of its elements."""


@dataclass(frozen=True)
class ModulePart:
    """A part of the model that may make a rank's results depend on more than its own sequences.

    Attributes:
        kind: "statistics over a batch" or "random numbers".
        name: its place in the model, such as `encoder.norm`.
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
        apart: a parameter that differs between ranks after the last update; None: all are the same, bit for bit.
        weights: by parameter, sketches before the first update (at 0) and after each update; shape (updates + 1, SKETCH).
        gradients: by parameter, sketches of the gradients reduced over the ranks, before noise and clipping; (updates, SKETCH).
        elements: the number of elements of each parameter.
    """

    size: int
    losses: list[Losses]
    num_sequences: list[int]
    data: list[int]
    rates: list[float]
    parts: list[ModulePart]
    apart: str | None
    weights: Mapping[str, Array]
    gradients: Mapping[str, Array]
    elements: Mapping[str, int]


def sum_losses(by_rank: Iterable[Losses]) -> Losses:
    """The losses of a step over all ranks."""
    total: Losses = {}
    for losses in by_rank:
        for name, (value, count) in losses.items():
            before = total.get(name, (0.0, 0.0))
            total[name] = before[0] + value, before[1] + count
    return total


@dataclass(frozen=True)
class Difference:
    """A place where two runs differ.

    Attributes:
        number: the step or the update, counted from 1; 0: before the first update.
        name: the loss or the parameter.
        distance: the relative difference.
    """

    number: int
    name: str
    distance: float


@dataclass(frozen=True)
class Agreement:
    """How far one kind of values agrees.

    Attributes:
        largest: the largest difference; None: there was nothing to compare.
        first: the first step or update beyond the tolerance, and in it the first loss or parameter; None: there is none.
    """

    largest: Difference | None
    first: Difference | None

    @property
    def words(self) -> str:
        """The number of digits that agree, in words."""
        return digits(0.0 if self.largest is None else self.largest.distance)


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs.

    Attributes:
        set_aside: parameters whose weights were not compared, as their gradients are only rounding errors.
        first_weights: the first parameter that differs before the first update.
    """

    losses: Agreement
    gradients: Agreement
    weights: Agreement
    set_aside: tuple[str, ...]
    first_weights: Difference | None

    @property
    def agree(self) -> bool:
        return all(agreement.first is None for agreement in (self.losses, self.gradients, self.weights))


def compare(record: Record, reference: Record, tolerance: float) -> Comparison:
    """Compare a run with another one, relative to the values of the latter."""
    gradients, names = _distances(record.gradients, reference.gradients, reference.elements, LEAST_GRADIENT)
    of_gradients = _agreement(gradients, names, tolerance, first_number=1)
    weights, all_names = _distances(record.weights, reference.weights, reference.elements, LEAST_WEIGHT)
    beyond = {name for name, column in zip(all_names, weights.T, strict=True) if len(column) and column.max() > tolerance}
    aside = [name for name in all_names if name in beyond & _rounding_errors(reference)] if of_gradients.first is None else []
    compared = [number for number, name in enumerate(all_names) if name not in aside]
    of_weights = _agreement(weights[:, compared], [all_names[number] for number in compared], tolerance, first_number=0)
    first = of_weights.first if of_weights.first is not None and of_weights.first.number == 0 else None
    return Comparison(_compare_losses(record.losses, reference.losses, tolerance), of_gradients, of_weights, tuple(aside), first)


def digits(distance: float) -> str:
    """A relative distance as the number of digits that agree.

    >>> digits(0.0), digits(3e-5), digits(0.02), digits(0.7), digits(1e-9)
    ('identical', '4 digits', '1 digit', 'no digit', '7 digits')
    """
    if distance == 0:
        return "identical"
    count = min(MOST_DIGITS, max(0, floor(-log10(distance)))) if isfinite(distance) else 0
    return f"{count or 'no'} digit{'' if count < 2 else 's'}"


def distance_words(distance: float) -> str:
    """A relative distance in words.

    >>> distance_words(0.031)
    '0.031 of its norm (1 digit)'
    """
    return f"{distance:.2g} of its norm ({digits(distance)})"


def means(losses: Losses) -> dict[str, float]:
    """Each loss divided by its number of elements."""
    return {name: total / count for name, (total, count) in losses.items() if count}


def _compare_losses(losses_here: Sequence[Losses], reference: Sequence[Losses], tolerance: float) -> Agreement:
    """Compare each loss relative to its largest mean, except counts of errors (whole numbers): rounding may change them by 1."""
    names = sorted(
        name
        for name in {name for losses in (*losses_here, *reference) for name in losses}
        if not _counts_errors(name, losses_here, reference)
    )
    ours, theirs = ([means(losses) for losses in run] for run in (losses_here, reference))
    steps = min(len(ours), len(theirs))
    table = numpy.zeros((steps, len(names)))
    for column, name in enumerate(names):
        scale = max((abs(theirs[step].get(name, 0.0)) for step in range(steps)), default=0.0)
        for step in range(steps):
            if name in ours[step] or name in theirs[step]:
                table[step, column] = _relative(abs(ours[step].get(name, inf) - theirs[step].get(name, inf)), scale)
    return _agreement(table, names, tolerance, first_number=1)


def _counts_errors(name: str, *runs: Sequence[Losses]) -> bool:
    totals = [losses[name][0] for run in runs for losses in run if name in losses]
    return all(isfinite(total) and total == round(total) for total in totals)


def _relative(difference: float, scale: float) -> float:
    if isnan(difference):
        return inf
    return 0.0 if difference == 0 else difference / scale if scale else inf


def _distances(
    values: Mapping[str, Array], reference: Mapping[str, Array], elements: Mapping[str, int], least: float
) -> tuple[Array, list[str]]:
    """The relative distances, shape (updates, parameters), and the parameters' names, in the model's order."""
    names = list(reference)
    if not names or set(values) != set(reference):
        missing = sorted(set(values) ^ set(reference))
        return numpy.full((1, len(missing)), inf), missing
    updates = min(len(values[names[0]]), len(reference[names[0]]))
    apart = numpy.stack(
        [numpy.linalg.norm(values[name][:updates] - reference[name][:updates], axis=-1) for name in names], axis=-1
    )
    norms, typical = _norms(reference, elements)
    scale = numpy.maximum(norms[:updates], least * typical[:updates])
    with numpy.errstate(divide="ignore", invalid="ignore"):
        distances = numpy.where(apart == 0, 0.0, apart / scale)
    return numpy.where(numpy.isnan(distances), inf, distances), names


def _norms(sketches: Mapping[str, Array], elements: Mapping[str, int]) -> tuple[Array, Array]:
    """The norms of all parameters, and the typical norms they would have if all elements of the model were equal in size; shape
    (updates, parameters)."""
    norms = numpy.stack([numpy.linalg.norm(values, axis=-1) for values in sketches.values()], axis=-1)
    sizes = numpy.array([elements[name] for name in sketches], dtype=numpy.float64)
    typical = numpy.sqrt(numpy.square(norms).sum(axis=1, keepdims=True) / sizes.sum()) * numpy.sqrt(sizes)
    return norms, typical


def _rounding_errors(record: Record) -> set[str]:
    """The parameters whose gradients are only rounding errors, but not all zero."""
    if not record.gradients:
        return set()
    norms, typical = _norms(record.gradients, record.elements)
    small = numpy.all(norms < ROUNDING * typical, axis=0) & numpy.any(norms > 0, axis=0)
    return {name for name, is_small in zip(record.gradients, small.tolist(), strict=True) if is_small}


def _agreement(table: Array, names: Sequence[str], tolerance: float, first_number: int) -> Agreement:
    if not table.size:
        return Agreement(None, None)

    def at(row: int, column: int) -> Difference:
        return Difference(first_number + row, names[column], float(table[row, column]))

    row, column = divmod(int(table.argmax()), table.shape[1])
    beyond = numpy.argwhere(table > tolerance)
    return Agreement(at(row, column), at(*beyond[0]) if len(beyond) else None)


def factor(gradients: Mapping[str, Array], reference: Mapping[str, Array], tolerance: float) -> float | None:
    """The factor by which all gradients of the first update differ; None: they differ by more than a factor."""
    if set(gradients) != set(reference) or not reference:
        return None
    ours, theirs = (numpy.concatenate([run[name][0] for name in reference]) for run in (gradients, reference))
    square = float(theirs @ theirs)
    if not square or not isfinite(square):
        return None
    ratio = float(ours @ theirs) / square
    residual = float(numpy.linalg.norm(ours - ratio * theirs))
    return ratio if ratio and residual <= tolerance * abs(ratio) * sqrt(square) else None
