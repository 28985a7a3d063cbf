"""What every dataset can be asked for, with defaults where a dataset does not say."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy

from hvdtrain.data.types import Array, Dataset


def at_epoch(dataset: Dataset, epoch: int) -> Dataset:
    """The dataset as it is in an epoch (counted from 1): itself, unless it draws other random numbers in each.

    What is returned shares files and processes with the dataset, which alone is closed.
    """
    change = getattr(dataset, "at_epoch", None)
    return dataset if change is None else change(epoch)


def generator_for(seed: int, epoch: int, index: int) -> numpy.random.RandomState:
    """The random numbers of a sequence in an epoch: the same whoever draws them, in whichever order.

    A RandomState, as functions that were written for RETURNN expect.
    """
    return numpy.random.RandomState([seed, epoch, index])


def accepted(function: Callable[..., Any], names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the keyword arguments that a function takes.

    >>> accepted(lambda arrays, *, epoch: None, ("epoch", "rng")), accepted(lambda arrays, **_: None, ("epoch", "rng"))
    (('epoch',), ('epoch', 'rng'))
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, some of them
        return ()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return names
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    own = {parameter.name for parameter in parameters if parameter.kind in by_keyword}
    return tuple(name for name in names if name in own)


def file_bounds(dataset: Dataset) -> Array:
    """Where each file's sequences begin, and where those of the last one end; one file where the dataset knows of none."""
    whole = numpy.array([0, dataset.num_sequences], dtype=numpy.int64)
    return getattr(dataset, "group_bounds", whole)
