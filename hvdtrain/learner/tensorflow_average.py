"""An exponential moving average of the weights, with TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.data.types import Array
from hvdtrain.learner.averaging import kept
from hvdtrain.learner.tensorflow_variables import array_of, tensorflow_variable


class WeightAverage:
    """Follows the trainable variables; others, such as BatchNorm's moving mean, are averages already and have no other.

    Args:
        named: the trainable variables by name.

    Attributes:
        updates: how many it has followed.
    """

    def __init__(self, named: Mapping[str, Any], decay: float) -> None:
        self._variables = {name: tensorflow_variable(variable) for name, variable in named.items()}
        self._decay = decay
        self._others: dict[str, tf.Variable] = {}  # the average; inside of `used`, the weights that are trained
        self._is_used = False
        self._follow = tf.function(self._add_share, autograph=False)
        self.updates = 0

    def start(self, updates: int = 0) -> None:
        """Begin with the present weights."""
        for name, variable in self._variables.items():
            if name in self._others:
                self._others[name].assign(variable)
            else:
                self._others[name] = tf.Variable(variable, trainable=False)
        self.updates = updates

    @property
    def started(self) -> bool:
        return bool(self._others)

    def follow(self, updates: int) -> None:
        """Be told that the weights are what they are after so many updates more."""
        self._follow(tf.constant(1 - kept(self._decay, self.updates, updates), tf.float32))
        self.updates += updates

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside the `with` block the model has the average as its weights."""
        self._swap()
        self._is_used = True
        try:
            yield
        finally:
            self._swap()
            self._is_used = False

    def both(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Copies of the average and of the weights that are trained, by name."""
        own = {name: array_of(variable) for name, variable in self._variables.items()}
        others = {name: array_of(variable) for name, variable in self._others.items()}
        return (own, others) if self._is_used else (others, own)

    def adopt(self, changed: set[str]) -> None:
        """Take over weights, given by their names, that were set from outside."""
        for name in changed & self._others.keys():
            self._others[name].assign(self._variables[name])

    def _add_share(self, share: tf.Tensor) -> None:
        for name, variable in self._variables.items():
            self._others[name].assign_add((variable - self._others[name]) * tf.cast(share, variable.dtype))

    def _swap(self) -> None:
        for name, variable in self._variables.items():
            before = tf.identity(variable)
            variable.assign(self._others[name])
            self._others[name].assign(before)
