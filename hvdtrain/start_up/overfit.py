"""Repeated training on a few batches (`overfit_batches`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy

from hvdtrain.errors import DataError
from hvdtrain.runtime import log
from hvdtrain.settings import Settings
from hvdtrain.training.agreement import plan_together
from hvdtrain.training.session import Session


def overfit_settings(settings: Settings) -> Settings:
    """The settings of a training with `overfit_batches`: it starts from scratch, and does not touch files of other trainings."""
    prefix = Path(settings.run.model)
    return replace(
        settings,
        run=replace(settings.run, model=str(prefix.parent / "overfit" / prefix.name)),
        start=replace(settings.start, start_epoch=1),
        saving=replace(settings.saving, checkpoint_mirror=None),
    )


def repeat_batches(session: Session, number: int) -> Session:
    """Collective. The session with the first N batches of each rank, repeated for as many as an epoch has. Raises: DataError."""
    feed = session.feeds[0]
    if feed.dataset.has_fixed_order:
        raise DataError(
            f"overfit_batches: expected a dataset that can be read in any order, got {feed.name}, which RETURNN reads in its own "
            "(convert it once with hvdtrain dump and train on the HDF file)"
        )
    plan = plan_together(session.comm, feed, 1)
    size = session.comm.size if feed.distribution == "shard" else 1
    first = numpy.arange(min(number * size, plan.num_batches))
    repeated = plan.with_batches(numpy.resize(first, plan.num_batches))
    log.info(f"overfit_batches: {len(first)} of {plan.num_batches} batches, again and again; files go to overfit/")
    return replace(session, feeds=[replace(feed, only=repeated), *session.feeds[1:]])
