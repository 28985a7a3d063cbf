"""The task summary, which shows the model layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain.plugins.inspect.export import is_of_torch
from hvdtrain.plugins.inspect.flops import first_batch
from hvdtrain.plugins.inspect.layers import OutputShapes, as_json, table
from hvdtrain.runtime import log
from hvdtrain.settings import Settings
from hvdtrain.start_up.job import open_session
from hvdtrain.start_up.without_files import writing_nothing
from hvdtrain.training.agreement import plan_together

if TYPE_CHECKING:
    from hvdtrain.plugins.inspect.torch_cost import StepCost


def summarize(settings: Settings) -> None:
    """Log the model layer by layer, with the shapes of outputs for a batch; train and write nothing. Raises: HvdtrainError."""
    settings = writing_nothing(settings.with_keys(torch_compile=False))
    with open_session(settings, "dry_run") as session:
        epoch = session.progress.epoch + 1
        # An evaluated dataset if there is one: evaluation may need data keys that train does not have.
        train, *evaluated = session.epochs.feeds(session.feeds, epoch)
        feed = (evaluated or [train])[0]
        plan = plan_together(session.comm, feed, epoch)
        shapes: OutputShapes = {}
        with first_batch(session, feed, plan, epoch) as batch:
            if batch is not None and is_of_torch(session.learner.model):
                from hvdtrain.plugins.inspect.torch_models import output_shapes  # here, as the model may be another framework's

                shapes = output_shapes(session.learner, batch)
        for line in table(as_json(session.learner.layers(), shapes)):
            log.result(line)
        plan = plan if feed is train else plan_together(session.comm, train, epoch)
        with first_batch(session, train, plan, epoch) as batch:
            if batch is not None and is_of_torch(session.learner.model):
                from hvdtrain.plugins.inspect.torch_cost import step_cost  # here, as above

                cost = step_cost(session.learner, batch, settings.precision.precision().dtype)
                log.result(_cost_line(cost, len(batch.indices), session.learner.device_name))


def _cost_line(cost: StepCost, num_sequences: int, device: str) -> str:
    """How far a step is from what the device can do.

    >>> from hvdtrain.plugins.inspect.torch_cost import StepCost
    >>> _cost_line(StepCost(12_000_000_000, 0.5, 60e9, "float32"), 20, "CPU").partition("which is ")[2]
    '40% of the 60 GFLOP/s that a product of float32 matrices reaches on this CPU'
    """
    flops, peak = (f"{value / 1e9:.3g} GFLOP" for value in (cost.flops, cost.peak))
    return (
        f"training step of {num_sequences} sequences: {flops} forward and backward in {cost.seconds:.3f} s, which is "
        f"{cost.share:.0%} of the {peak}/s that a product of {cost.dtype} matrices reaches on this {device}"
    )
