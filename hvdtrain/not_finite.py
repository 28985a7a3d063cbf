"""Telling which loss is no finite number: on which rank, in which step, for which sequences."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.comm.base import Communicator, together
from hvdtrain.data.types import Dataset
from hvdtrain.errors import TrainingError
from hvdtrain.learner.base import NotFinite
from hvdtrain.state import Within

HEAD = (
    "train_step: expected finite losses, got others (stop_on_nonfinite_train_score = False goes on nevertheless; "
    "num_allowed_consec_invalid_gradient_steps leaves such updates out):"
)

FEW = 3
"""So many of a rank's losses are told: all that follow are no numbers either."""


def not_finite(comm: Communicator, dataset: Dataset, found: Sequence[NotFinite], within: Within) -> TrainingError:
    """Collective. The error that tells what every rank found."""

    def told() -> list[str]:
        return [_line(one, dataset, within) for one in found[:FEW]]

    by_rank = comm.gather(together(comm, told, name="not_finite_tags"), name="not_finite")
    lines = [f"rank {rank}: {line}" for rank, lines in enumerate(by_rank) for line in lines]
    error = TrainingError("\n  ".join([HEAD, *lines]))
    error.on_every_rank = True
    return error


def _line(one: NotFinite, dataset: Dataset, within: Within) -> str:
    sequences = ", ".join(dataset.tags(one.indices))
    broken = ", ".join(one.parameters) or "none, so the loss itself is the cause"
    return (
        f"{one.loss} = {one.value} in step {one.step - within.first_step} of epoch {within.epoch}, sequences {sequences}; "
        f"parameters that are not finite: {broken}"
    )
