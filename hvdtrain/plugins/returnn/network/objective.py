"""What a network minimizes, in parts: losses of the batch, and constraints on the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.learner.meter import TINY


@dataclass(frozen=True)
class Term:
    """A loss that is minimized.

    Attributes:
        value: the sum over the batch times its scale; not normalized.
        count: the number by which a normalized loss is divided, float64.
    """

    value: Any
    count: Any
    is_normalized: bool


@dataclass(frozen=True)
class Objective:
    """The parts of a network's objective.

    Attributes:
        whole: RETURNN's objective: normalized losses are divided by the counts of the batch, constraints are included.
        of_batch: the same without constraints.
        constraints: such as L2: a function of the parameters alone; None: there are none. Those that depend on the batch, such
            as `spatial_smoothing`, belong to `of_batch`.
    """

    whole: Any
    of_batch: Any
    constraints: Any
    terms: tuple[Term, ...]

    @property
    def normalized_terms(self) -> list[Term]:
        return [term for term in self.terms if term.is_normalized]

    def undivided(self) -> Objective:
        """The whole objective as one loss, of which those of several batches and ranks are summed."""
        return Objective(self.whole, self.whole, None, (Term(self.whole, tf.constant(0.0, tf.float64), is_normalized=False),))

    def divided_by(self, totals: Any) -> Any:
        """The losses of the batch, the normalized ones divided by other counts; a tensor."""
        counts = {id(term): totals[number] for number, term in enumerate(self.normalized_terms)}
        terms = [
            term.value / tf.cast(tf.maximum(counts[id(term)], TINY), term.value.dtype) if term.is_normalized else term.value
            for term in self.terms
        ]
        return tf.add_n([tf.cast(term, terms[0].dtype) for term in terms])


def objective_of(network: Any) -> Objective:
    whole = network.get_objective()
    losses = network.get_total_loss()
    constraints = network.get_total_constraints()
    terms = tuple(_term(holder) for holder in network.losses_dict.values() if holder.get_loss_value_for_objective() is not None)
    if not tf.is_tensor(constraints):
        return Objective(whole, losses, None, terms)
    alone: list[Any] = []
    of_batch: list[Any] = []
    for summand in _summands(constraints):
        (of_batch if depends_on_feed(summand) else alone).append(summand)
    if of_batch:
        terms = (*terms, *(Term(term, tf.constant(0.0, tf.float64), is_normalized=False) for term in of_batch))
        losses = tf.add_n([losses, *of_batch])
        constraints = tf.add_n(alone) if alone else None
    return Objective(whole, losses, constraints, terms)


def _summands(tensor: Any) -> list[Any]:
    """The tensors whose sum a tensor is, without constants."""
    if tensor.op.type not in ("Add", "AddV2"):
        return [] if tensor.op.type == "Const" else [tensor]
    return [summand for input_tensor in tensor.op.inputs for summand in _summands(input_tensor)]


def _term(holder: Any) -> Term:
    value = holder.get_loss_value_for_objective()
    count = tf.cast(1.0 / holder.get_norm_factor(), tf.float64)
    if holder.loss.use_normalized_loss:
        value = holder.get_loss_value() * holder.loss.scale
    return Term(value, count, bool(holder.loss.use_normalized_loss))


def depends_on_feed(tensor: Any) -> bool:
    """Whether a tensor of a graph depends on a placeholder."""
    visited = set()
    pending = [tensor.op]
    while pending:
        operation = pending.pop()
        if operation in visited:
            continue
        visited.add(operation)
        if operation.type.startswith("Placeholder"):
            return True
        pending += [tensor_before.op for tensor_before in operation.inputs]
        pending += operation.control_inputs
    return False
