"""What in a model makes results depend on how sequences are dealt: modules by their classes, random numbers by trying."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.comm.base import SingleCommunicator
from hvdtrain.data.types import Array, Batch
from hvdtrain.learner.base import Learner
from hvdtrain.prove.record import Part
from hvdtrain.session import open_session
from hvdtrain.settings import Settings

STATISTICS, RANDOM = "statistics over a batch", "random numbers"

OVER_BATCHES = ("_BatchNorm", "BatchNormalization")
"""Classes whose subclasses compute statistics over a batch in training, of PyTorch and Keras."""

RATES = ("p", "dropout", "recurrent_dropout", "rate", "stddev")
"""Attributes that say how much is random, of PyTorch's and Keras' classes and of most that authors write themselves."""

RANDOM_CLASSES = ("_DropoutNd", "Dropout", "GaussianNoise", "GaussianDropout", "AlphaDropout")
"""Classes whose subclasses draw random numbers in training."""


MORE_PADDING = 3
"""Frames that are added to a batch to see whether the losses depend on padding."""


def parts_of(learner: Learner) -> list[Part]:
    """The modules that BatchNorm or dropout is in, and that do something in training."""
    found = []
    for name, module in learner.modules():
        classes = {one.__name__ for one in type(module).__mro__}
        if not getattr(module, "training", True) or getattr(module, "trainable", True) is False:
            continue  # a part of the model that is kept as it is
        if classes & set(OVER_BATCHES):
            found.append(Part(STATISTICS, name, type(module).__name__))
        elif any(_rates(module, classes)):
            found.append(Part(RANDOM, name, type(module).__name__))
    return found


def without_dropout(learner: Learner) -> None:
    """Switch dropout off in all modules. A call of `functional.dropout` with a number of its own is not found."""
    for _, module in learner.modules():
        for rate in _rates(module, {one.__name__ for one in type(module).__mro__}):
            setattr(module, rate, 0.0)


def _rates(module: Any, classes: set[str]) -> Iterator[str]:
    """The attributes of `RATES` that are above zero in a module. Only `dropout` means what it says in an author's own class."""
    of_dropout = bool(classes & set(RANDOM_CLASSES))
    for name in RATES:
        value = vars(module).get(name)
        if isinstance(value, (int, float)) and value > 0 and (of_dropout or "dropout" in name):
            if name != "dropout" or getattr(module, "num_layers", 2) > 1 or "RNNBase" not in classes:  # it is between layers
                yield name


@dataclass(frozen=True)
class Probe:
    """What one rank finds out by computing the same batch again.

    Attributes:
        repeated: the largest relative difference of a loss when the same step is repeated: the model, or train_step, has a state
            of its own that the seeds of a step do not reach.
        other_rank: the same with the random numbers of another rank.
        padded: the same with more padding behind the same sequences, without dropout.
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
        dropout: whether it is left as it is.
        folder: for the model's weights.
    """
    files = folder / "probe.model", folder / "probe.optimizer"
    with open_session(settings, "measure", SingleCommunicator()) as session:
        with session.feeds[0].read([indices], epoch=1) as batches:
            batch = next(iter(batches))
        session.learner.state.save(*files, progress={})
        first = _losses(session.learner, batch, dropout)
        again = _losses(session.learner, batch, dropout)
    with open_session(settings, "measure", OtherRank()) as session:
        session.learner.state.load(files[0], None)
        other = _losses(session.learner, batch, dropout)
    with open_session(settings, "measure", SingleCommunicator()) as session:
        session.learner.state.load(files[0], None)
        as_it_is = _losses(session.learner, batch, dropout=False)
        try:
            padded = _losses(session.learner, _with_padding(batch), dropout=False)
        except Exception:  # a model for sequences of a fixed length
            padded = as_it_is
    return Probe(_difference(first, again), _difference(first, other), _difference(as_it_is, padded))


def _with_padding(batch: Batch) -> Batch:
    """The same sequences with `MORE_PADDING` more frames of zeros behind all of them."""
    data = dict(batch.data)
    for key, padded in batch.data.items():
        if padded.values.dtype != object:
            widths = [(0, MORE_PADDING if axis == 1 else 0) for axis in range(padded.values.ndim)]
            data[key] = replace(padded, values=numpy.pad(padded.values, widths))
    return replace(batch, data=data)


def _losses(learner: Learner, batch: Batch, dropout: bool) -> dict[str, float]:
    """The sums of the losses of a training's first step; the weights stay as they are."""
    if not dropout:
        without_dropout(learner)
    learner.meter.take_scores()
    learner.begin_epoch(1, 0)
    learner.backward(batch)
    learner.update(0.0)
    return {name: fsum(totals) for name, (totals, _) in learner.meter.take_scores().state().items()}


def _difference(one: dict[str, float], other: dict[str, float]) -> float:
    """The largest relative difference; of a count of errors, it is one too."""
    found = [abs(one[name] - other.get(name, 0.0)) / (abs(one[name]) or 1.0) for name in one]
    return max(found, default=0.0)
