"""Why two runs differ: evidence from the model, from experiments on one rank, and from the records of the runs.

First the part that runs on ranks: `find_parts` finds modules whose results depend on how sequences are distributed, by their
classes, and `probe` finds random numbers by experiment. Then the part of the command: `causes`, where each of `FINDERS` looks
for one cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.data.types import Array, Batch, Packed
from hvdtrain.errors import first_few
from hvdtrain.learner.base import Learner
from hvdtrain.learner.optimizer import class_names
from hvdtrain.plugins.prove.compare import Comparison, ModulePart, Record, compare, factor
from hvdtrain.report.starts import ranks_text
from hvdtrain.settings import Settings
from hvdtrain.start_up.job import open_session

STATISTICS, RANDOM = "statistics over a batch", "random numbers"

OVER_BATCHES = ("_BatchNorm", "BatchNormalization")
"""Base classes of PyTorch's and Keras' modules that compute statistics over a batch in training."""

RATES = ("p", "dropout", "recurrent_dropout", "rate", "stddev")
"""Attributes for the amount of randomness in PyTorch's and Keras' classes, and in most custom ones."""

RANDOM_CLASSES = ("_DropoutNd", "Dropout", "GaussianNoise", "GaussianDropout", "AlphaDropout")
"""Base classes of modules that draw random numbers in training."""

MORE_PADDING = 3
"""The number of frames added to a batch to test whether losses depend on padding."""

MOST_NAMES = 3
"""The number of a model's parts to name."""

NOT_FOUND = "not found: does the config depend on hvdtrain.rank() or hvdtrain.size()? Do rounding errors grow (--steps 1)?"

OF_BATCHES = (
    "not found, but the result depends on which sequences form a batch: is there a mean over a batch in train_step or the "
    "model, or padding that is not masked?"
)


def find_parts(learner: Learner) -> list[ModulePart]:
    """The modules with BatchNorm or dropout that are active in training."""
    parts = []
    for name, module in learner.modules():
        classes = class_names(module)
        if not getattr(module, "training", True) or getattr(module, "trainable", True) is False:
            continue  # a frozen part of the model
        if classes & set(OVER_BATCHES):
            parts.append(ModulePart(STATISTICS, name, type(module).__name__))
        elif any(_random_rates(module, classes)):
            parts.append(ModulePart(RANDOM, name, type(module).__name__))
    return parts


def disable_dropout(learner: Learner) -> None:
    """Switch dropout off in all modules. A call of `functional.dropout` with a constant rate is not found."""
    for _, module in learner.modules():
        for rate in _random_rates(module, class_names(module)):
            setattr(module, rate, 0.0)


def _random_rates(module: Any, classes: set[str]) -> Iterator[str]:
    """The attributes of `RATES` that are above zero in a module. In a custom class, only names with `dropout` are unambiguous."""
    of_dropout = bool(classes & set(RANDOM_CLASSES))
    for name in RATES:
        value = vars(module).get(name)
        if isinstance(value, (int, float)) and value > 0 and (of_dropout or "dropout" in name):
            # An RNN of one layer has no dropout, which PyTorch applies between layers.
            if name != "dropout" or getattr(module, "num_layers", 2) > 1 or "RNNBase" not in classes:
                yield name


@dataclass(frozen=True)
class Probe:
    """The results of computing the same batch again on one rank.

    Attributes:
        repeated: the largest relative difference of a loss when the same step is repeated; above 0 if the model or train_step has
            state that a step's seeds do not control.
        other_rank: the same with the random numbers of another rank.
        padded: the same with more padding after the same sequences, without dropout.
    """

    repeated: float
    other_rank: float
    padded: float


class OtherRank(SingleCommunicator):
    """A job of one rank that has the random numbers of rank 1."""

    rank = 1


def probe(settings: Settings, indices: Array, dropout: bool, folder: Path) -> Probe:
    """Compute the losses of a batch several times with the same weights. Nothing is communicated. Raises: HvdtrainError.

    Args:
        indices: the batch's sequences, or chunks.
        dropout: whether to leave it on.
        folder: for the model's weights.
    """
    files = folder / "probe.model", folder / "probe.optimizer"
    with open_session(settings, "measure", SingleCommunicator()) as session:
        with session.feeds[0].read([indices], epoch=1) as batches:
            batch = next(iter(batches))
        session.learner.state.contents({}).write(*files)
        first = _losses(session.learner, batch, dropout)
        again = _losses(session.learner, batch, dropout)
    with open_session(settings, "measure", OtherRank()) as session:
        session.learner.state.load(files[0], None)
        as_other_rank = _losses(session.learner, batch, dropout)
    with open_session(settings, "measure", SingleCommunicator()) as session:
        session.learner.state.load(files[0], None)
        unpadded = _losses(session.learner, batch, dropout=False)
        try:
            padded = _losses(session.learner, _with_padding(batch), dropout=False)
        except Exception:  # a model for sequences of a fixed length
            padded = unpadded
    return Probe(_difference(first, again), _difference(first, as_other_rank), _difference(unpadded, padded))


def _with_padding(batch: Batch) -> Batch:
    """The same sequences, each followed by `MORE_PADDING` more frames of zeros, unless its batches never have padding."""
    data = dict(batch.data)
    for key, padded in batch.data.items() if batch.joined is None else ():
        if padded.values.dtype != object and not isinstance(padded, Packed):
            widths = [(0, MORE_PADDING if axis == 1 else 0) for axis in range(padded.values.ndim)]
            data[key] = replace(padded, values=numpy.pad(padded.values, widths))
    return replace(batch, data=data)


def _losses(learner: Learner, batch: Batch, dropout: bool) -> dict[str, float]:
    """The sums of the losses of a training's first step; the weights stay as they are."""
    if not dropout:
        disable_dropout(learner)
    learner.meter.take_scores()
    learner.begin_epoch(1, 0)
    learner.backward(batch)
    learner.update(0.0)
    return {name: fsum(totals) for name, (totals, *_) in learner.meter.take_scores().state().items()}


def _difference(losses: dict[str, float], reference: dict[str, float]) -> float:
    differences = [abs(losses[name] - reference.get(name, 0.0)) / (abs(losses[name]) or 1.0) for name in losses]
    return max(differences, default=0.0)


@dataclass(frozen=True)
class Case:
    """Two runs that differ.

    Attributes:
        name: the name of the run.
        record, reference: of the run, and of the one that it is compared with.
        accumulated: a run of one rank on the batches of the ranks of `several`, one after another; None: not tried.
        probe: the results of computing a batch again.
    """

    name: str
    record: Record
    reference: Record
    comparison: Comparison
    tolerance: float
    settings: Settings
    accumulated: Record | None = None
    probe: Probe | None = None

    @property
    def several(self) -> Record:
        """The run on several ranks; of two such runs, not the reference."""
        return self.record if self.record.size > 1 else self.reference

    @property
    def exchange_agrees(self) -> bool | None:
        """Whether the ranks computed the same as one rank from the same batches; None: unknown."""
        if self.accumulated is None:
            return None
        return compare(self.several, self.accumulated, self.tolerance).agree


def causes(case: Case) -> list[str]:
    """The causes found, the most certain first."""
    causes = [cause for find in FINDERS for cause in find(case)]
    return causes or [OF_BATCHES if case.exchange_agrees else NOT_FOUND]


def _initial_weights(case: Case) -> Iterator[str]:
    if case.comparison.first_weights is not None:
        yield (
            f"initial weights: {case.comparison.first_weights.name} differs before the first update: get_model does not "
            "draw them from the generators of torch, numpy or random, which hvdtrain seeds, or it depends on the number of ranks"
        )


def _data(case: Case) -> Iterator[str]:
    for step, (ours, theirs) in enumerate(zip(case.record.data, case.reference.data, strict=False), 1):
        if ours != theirs:
            yield (
                f"data: the same sequences of step {step} have different contents: something draws random numbers or counts "
                "calls while they are read (map_seq, a custom dataset)"
            )
            return


def _counts(case: Case) -> Iterator[str]:
    """The number of a loss's elements is the same on any number of ranks, unless the loss depends on how batches are formed."""
    if not case.record.losses or not case.reference.losses:
        return
    size = case.record.size
    reference_size = case.reference.size
    for name, (_, theirs) in case.reference.losses[0].items():
        _, ours = case.record.losses[0].get(name, (0.0, theirs))
        if ours == theirs:
            continue
        if ours * reference_size == theirs * size and ours % size == 0 and theirs <= reference_size:
            yield (
                f"a mean of means: train_step marks {name} as one number per batch, so that an element of a small batch "
                "weighs more than one of a large batch (mark one number per element, with reduction='none'; "
                "use_normalized_loss=True takes the mean over the batches of all ranks)"
            )
        else:
            yield (
                f"elements: {name} has {ours:g} elements in step 1 of {ranks_text(size)}, {theirs:g} in that of "
                f"{ranks_text(reference_size)}: are padded frames among them? (select the others with extern_data[...].mask)"
            )


def _rates(case: Case) -> Iterator[str]:
    for update, (ours, theirs) in enumerate(zip(case.record.rates, case.reference.rates, strict=False), 1):
        if abs(ours - theirs) > 1e-6 * abs(theirs):
            rule = case.settings.reduce.learning_rate_scale
            why = f"horovod_scale_lr = {rule!r}" if rule else "does the config compute it from hvdtrain.size()?"
            yield f"learning rate: {ours:g} instead of {theirs:g} in update {update} ({why})"
            return


def _reduction(case: Case) -> Iterator[str]:
    kind = case.settings.reduce.reduce_type
    if kind != "grad":
        yield (
            f"horovod_reduce_type = {kind!r}: by design, every rank updates its model separately between two syncs, which one "
            "rank does not (++horovod_reduce_type grad proves the rest)"
        )


def _compression(case: Case) -> Iterator[str]:
    kind = case.settings.reduce.compression
    if kind is not None:
        yield (
            f"horovod_compression = {kind!r}: messages are rounded, and one rank sends none (++horovod_compression none "
            "or a larger --tolerance proves the rest)"
        )


def _gradient_factor(case: Case) -> Iterator[str]:
    if case.comparison.gradients.first is None or case.comparison.gradients.first.number > 1:
        return
    ratio_found = factor(case.record.gradients, case.reference.gradients, case.tolerance)
    if ratio_found is None:
        return
    ratio = case.reference.size / case.record.size
    averaged = case.settings.reduce.average_gradients and abs(ratio_found - ratio) < case.tolerance
    why = (
        "horovod_avg_grad = True divides gradients by the number of ranks, though the losses are sums: mark them with "
        "use_normalized_loss=True, or leave the key out"
        if averaged
        else "is a loss divided by the size of a batch, or multiplied by the number of ranks?"
    )
    yield f"a factor: all gradients of update 1 are {ratio_found:.6g} times those of {ranks_text(case.reference.size)} ({why})"


def _statistics(case: Case) -> Iterator[str]:
    parts = [part for part in case.record.parts + case.reference.parts if part.kind == STATISTICS]
    if any(part.type.startswith("SyncBatchNorm") for part in parts):
        return  # of the run with more ranks; on one rank it is a BatchNorm
    parts = list(dict.fromkeys(parts))
    if parts and case.record.size != case.reference.size:
        yield (
            f"{name_parts(parts)}: its statistics are those of each rank's own batch (with PyTorch, ++sync_batch_norm 1 takes "
            "them over the batches of all ranks; layer and group normalization have none)"
        )


def _padding(case: Case) -> Iterator[str]:
    """The amount of padding depends on the longest sequence of a batch."""
    tried = case.probe
    if tried is None or tried.padded <= case.tolerance or tried.repeated > case.tolerance:
        return
    has_hidden_randomness = tried.other_rank > case.tolerance and not any(part.kind == RANDOM for part in case.record.parts)
    if not has_hidden_randomness:  # with it, more frames would shift the random numbers
        yield (
            f"padding: {MORE_PADDING} more padded frames after the same sequences change the losses by {tried.padded:.2g}: the "
            "model (a convolution, a BatchNorm) or train_step does not mask them (extern_data[...].mask)"
        )


def _random(case: Case) -> Iterator[str]:
    parts = [part for part in case.record.parts if part.kind == RANDOM]
    tried = case.probe
    if parts:
        yield f"{name_parts(parts)}: every rank draws different random numbers (--without-dropout proves the rest)"
    elif tried is not None and tried.other_rank > case.tolerance >= tried.repeated:
        yield (
            f"random numbers in train_step or the model, but in no module known to draw them: with those of another rank the "
            f"losses of the same batch differ by {tried.other_rank:.2g} (every rank draws different ones)"
        )
    if tried is not None and tried.repeated > case.tolerance:
        yield (
            f"state in the model or train_step: the same step computed twice gives losses that differ by "
            f"{tried.repeated:.2g} (a random generator that hvdtrain does not seed, or a counter)"
        )


def describe_exchange(case: Case) -> str | None:
    """Whether the exchange between the ranks causes the difference; None: unknown."""
    if case.exchange_agrees is None:
        return None
    ranks = ranks_text(case.several.size)
    subject = f"one rank that takes the batches of {ranks} one after another, with their learning rates, computes"
    if case.exchange_agrees:
        return f"{subject} the same: the exchange between the ranks is right"
    return f"{subject} something else, too"


FINDERS: Sequence[Callable[[Case], Iterator[str]]] = (
    _initial_weights,
    _data,
    _rates,
    _reduction,
    _compression,
    _counts,
    _gradient_factor,
    _statistics,
    _padding,
    _random,
)
"""Each looks for one cause."""


def name_parts(parts: Sequence[ModulePart]) -> str:
    """The names of the first parts of a model.

    >>> name_parts([ModulePart("", "a", "Dropout"), ModulePart("", "", "Net")])
    'Dropout at a, Net'
    """
    return first_few([f"{part.type} at {part.name}" if part.name else part.type for part in parts], MOST_NAMES)
