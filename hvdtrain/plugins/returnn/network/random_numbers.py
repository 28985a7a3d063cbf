"""Random numbers of a TensorFlow graph as states that can be saved and set.

TensorFlow keeps the position of a stateful random operation in the session, where it can neither be read nor set, so a training
that is resumed would continue with other random numbers. Here, such operations are replaced while the graph is built: the new
ones compute the same numbers from the same seeds, and keep their positions in variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import gen_random_ops, gen_stateful_random_ops
from tensorflow.python.ops import gen_stateless_random_ops_v2 as stateless

from hvdtrain.data.types import Array

v1 = tf.compat.v1

PHILOX = 1
"""The number of the algorithm, in both kinds of operations."""


class RandomNumbers:
    """The random operations of a part of a graph.

    Attributes:
        states: int64 of shape (3,) for each operation, in the order of their creation: two words of the position, and the key.
    """

    def __init__(self) -> None:
        self.states: list[Any] = []
        self._begins: list[tuple[int, int]] = []
        self._setting: tuple[Any, Any] | None = None

    @contextmanager
    def replace(self) -> Iterator[None]:
        """Replace the random operations that are created inside the `with` block."""
        replacements = {
            "random_uniform": self._floats(stateless.stateless_random_uniform_v2),
            "random_standard_normal": self._floats(stateless.stateless_random_normal_v2),
            "truncated_normal": self._floats(stateless.stateless_truncated_normal_v2),
            "random_uniform_int": self._integers,
        }
        originals = {name: getattr(gen_random_ops, name) for name in replacements}
        vars(gen_random_ops).update(replacements)
        try:
            yield
        finally:
            vars(gen_random_ops).update(originals)

    def initialize(self, session: Any) -> None:
        """Begin with the states that the operations would have in a new session."""
        session.run([state.initializer for state in self.states])

    def positions(self, session: Any) -> Array:
        """The state of every operation; int64 of shape (operations, 3)."""
        states = session.run(self.states)
        return numpy.stack(states) if states else numpy.zeros((0, 3), numpy.int64)

    def set_positions(self, session: Any, positions: Array) -> None:
        """Set what `positions` returned. Raises: ValueError, if it was of another network."""
        if positions.shape != (len(self.states), 3):
            raise ValueError(f"random numbers of {len(self.states)} operations, got those of {len(positions)}")
        with session.graph.as_default():
            for state, position in zip(self.states, positions, strict=True):
                state.load(position, session)

    def begin_at(self, session: Any, position: int) -> None:
        """Set all operations to a position that does not depend on what they have computed before."""
        if not self.states:
            return
        if self._setting is None:
            with session.graph.as_default():
                place = v1.placeholder(tf.int64, [])
                assigned = [
                    state.assign(tf.stack([place, *(tf.constant(word, tf.int64) for word in begin)])).op
                    for state, begin in zip(self.states, self._begins, strict=True)
                ]
                self._setting = place, tf.group(*assigned)
        place, assign = self._setting
        session.run(assign, {place: position})

    def _floats(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(shape: Any, dtype: Any, seed: int = 0, seed2: int = 0, name: str | None = None) -> Any:
            key, counter = self._next(shape, seed, seed2)
            return function(shape, key, counter, PHILOX, dtype=dtype, name=name)

        return operation

    def _integers(self, shape: Any, minval: Any, maxval: Any, seed: int = 0, seed2: int = 0, name: str | None = None) -> Any:
        key, counter = self._next(shape, seed, seed2)
        return stateless.stateless_random_uniform_int_v2(shape, key, counter, PHILOX, minval, maxval, name=name)

    def _next(self, shape: Any, seed: int, seed2: int) -> tuple[Any, Any]:
        """Advance a new operation's state, each time it runs, by the numbers that it needs. Returns its key and position."""
        with tf.control_dependencies(None):  # a variable belongs to the whole graph, also that of an operation in a loop
            initial = numpy.array([0, seed2, seed], numpy.int64)
            state = v1.Variable(initial, trainable=False, collections=[], use_resource=True, name="random_state")
        self.states.append(state)
        self._begins.append((seed2, seed))
        size = tf.reduce_prod(tf.cast(shape, tf.int64))
        before = gen_stateful_random_ops.rng_read_and_skip(state.handle, PHILOX, tf.cast(size, tf.uint64))
        words = tf.bitcast(before, tf.uint64)
        return words[2:], words[:2]


def random_of_tensorflow(graph: Any) -> list[str]:
    """The types of a graph's random operations that were not replaced, such as RandomShuffle."""
    return sorted(name for name in {operation.type for operation in graph.get_operations()} if _draws(name))


def _draws(operation: str) -> bool:
    """Whether operations of a type draw numbers from a state in the session."""
    definition = op_def_registry.get(operation)
    if definition is None or operation.startswith("Cudnn"):  # which have seeds for dropout, which RETURNN computes itself
        return False
    return definition.is_stateful and {"seed", "seed2"} <= {attribute.name for attribute in definition.attr}


def position_of(seeds: Sequence[int]) -> int:
    """A position that follows from seeds such as (seed, rank, step)."""
    return int(numpy.random.SeedSequence(seeds).generate_state(1, numpy.uint64)[0] >> 1)
