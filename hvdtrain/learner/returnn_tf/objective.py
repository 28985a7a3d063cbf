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
        constraints: such as L2: a function of the parameters alone; None: there are none, or they depend on the batch and belong
            to `of_batch`.
    """

    whole: Any
    of_batch: Any
    constraints: Any
    terms: tuple[Term, ...]

    @property
    def normalized(self) -> list[Term]:
        return [term for term in self.terms if term.is_normalized]

    def divided_by(self, totals: Any) -> Any:
        """The losses of the batch, the normalized ones divided by other counts; a tensor."""
        counts = {id(term): totals[number] for number, term in enumerate(self.normalized)}
        parts = [
            term.value / tf.cast(tf.maximum(counts[id(term)], TINY), term.value.dtype) if term.is_normalized else term.value
            for term in self.terms
        ]
        return tf.add_n([tf.cast(part, parts[0].dtype) for part in parts])


def objective_of(network: Any) -> Objective:
    """The objective of a TFNetwork."""
    whole, losses, constraints = network.get_objective(), network.get_total_loss(), network.get_total_constraints()
    terms = tuple(_term(holder) for holder in network.losses_dict.values() if holder.get_loss_value_for_objective() is not None)
    if not tf.is_tensor(constraints):
        constraints = None
    elif depends_on_feed(constraints):
        terms = (*terms, Term(constraints, tf.constant(0.0, tf.float64), is_normalized=False))
        losses, constraints = whole, None
    return Objective(whole, losses, constraints, terms)


def _term(holder: Any) -> Term:
    value = holder.get_loss_value_for_objective()
    count = tf.cast(1.0 / holder.get_norm_factor(), tf.float64)
    if holder.loss.use_normalized_loss:
        value = holder.get_loss_value() * holder.loss.scale
    return Term(value, count, bool(holder.loss.use_normalized_loss))


def depends_on_feed(tensor: Any) -> bool:
    """Whether a tensor of a graph depends on a placeholder."""
    found, left = set(), [tensor.op]
    while left:
        operation = left.pop()
        if operation in found:
            continue
        found.add(operation)
        if operation.type.startswith("Placeholder"):
            return True
        left += [one.op for one in operation.inputs]
        left += operation.control_inputs
    return False
