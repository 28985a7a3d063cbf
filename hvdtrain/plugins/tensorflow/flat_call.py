"""Calls of a graph in every step."""

from __future__ import annotations

import operator
from typing import Any

import tensorflow as tf


class FlatCall:
    """A concrete function that is called with tensors of its types only, in lists and dicts of always the same form.

    TensorFlow compares each argument with its type twice in every call, which takes as long as a small step. The first call is
    left to it, and shows whether it takes the tensors in the order in which they are flattened: then later ones are passed so.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._is_flat: bool | None = None  # None: there was no call yet

    def __call__(self, *arguments: Any) -> Any:
        if self._is_flat:
            return self._graph._call_flat(tf.nest.flatten(arguments), self._graph.captured_inputs)
        if self._is_flat is None:
            self._is_flat = self._takes_flat(arguments)
        return self._graph(*arguments)

    def _takes_flat(self, arguments: Any) -> bool:
        flat = tf.nest.flatten(arguments)
        try:
            taken = self._graph.function_type.unpack_inputs(self._graph.function_type.bind(*arguments))
        except Exception:  # another version's
            return False
        has_all = len(taken) == len(flat) and all(map(operator.is_, taken, flat))
        return has_all and all(hasattr(self._graph, name) for name in ("_call_flat", "captured_inputs"))
