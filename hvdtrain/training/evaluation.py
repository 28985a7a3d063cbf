"""Scores of a dataset, and the error about losses that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy

from hvdtrain.comm.base import Communicator, together
from hvdtrain.data.broken import finite_problem
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.feed import Feed
from hvdtrain.data.naming import Naming
from hvdtrain.errors import TrainingError, first_few
from hvdtrain.learner.base import Learner
from hvdtrain.learner.meter import NotFinite
from hvdtrain.runtime import log
from hvdtrain.runtime.scores import Scores
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.training.account import Account
from hvdtrain.training.agreement import plan_together
from hvdtrain.training.step_log import ScoreBuffer, StepLog, StepReport


def evaluate(
    comm: Communicator,
    learner: Learner,
    watchdog: Watchdog,
    feed: Feed,
    epoch: int,
    *,
    after_step: Callable[[], object] = lambda: None,
    step_log: StepLog,
) -> dict[str, float]:
    """Collective. The exact mean losses and errors over a whole dataset, and the scores of `epoch_scores`.

    Args:
        after_step: called by all ranks after each step, in which every rank evaluates a batch if it has one left.

    Raises:
        DataError: the ranks did not evaluate exactly what was planned, or all sequences are broken.
    """
    watchdog.beat(f"epoch {epoch}, planning the evaluation of {feed.name}", "planning")
    plan = plan_together(comm, feed, epoch)
    steps = -(-plan.num_batches // comm.size)
    buffer = ScoreBuffer(learner.meter)
    account = Account(feed, plan)
    step_log.begin(epoch, feed.name, steps)
    has_read = False
    with learner.evaluating(feed.name), feed.read(feed.rank_batches(plan), epoch, learner.staging) as batches:
        for number in range(1, steps + 1):
            watchdog.beat(f"epoch {epoch}, evaluation of {feed.name}, batch {number - 1}", "evaluation")
            batch = next(batches, None)
            if batch is not None:
                account.add(batch.planned)
                feed.broken.add(batch.broken)
                batch = batch.if_any
            if batch is not None:
                has_read = True
                with Naming(batch, feed):
                    learner.evaluate(batch)
            step_log.step(StepReport(number, number / steps, None, batch, buffer))
            after_step()
    step_log.end()
    results = buffer.take_all().compact(), account.take(plan.num_batches), feed.broken.take(), has_read
    gathered = comm.gather(results, name=f"scores.{feed.name}")
    account.check(f"evaluation of epoch {epoch}", [entry for _, entry, *_ in gathered])
    for line in feed.broken.merge([broken for *_, broken, _ in gathered]):
        log.warning(line)
    feed.broken.check_any(any(has_read for *_, has_read in gathered))
    scores = Scores.merge(rank_scores for rank_scores, *_ in gathered)
    for name, count in scores.counts().items():
        if count == 0:
            log.warning(
                f"{feed.name}: {name} has no value in epoch {epoch}: none of {len(plan.order)} sequences has an element for it"
            )
    means = learner.scoring.compute(comm, scores, feed.name)
    for name, mean in means.items():
        if scores.counts().get(name) and not isfinite(mean):
            log.warning(
                f"{feed.name}: {name} is {mean} in epoch {epoch}: an epoch without a number never counts as the best "
                "(training continues)"
            )
    return means


NOT_FINITE_HINT = (
    "stop_on_nonfinite_train_score = False continues nevertheless; num_allowed_consec_invalid_gradient_steps skips such updates"
)

MAX_LISTED = 3
"""How many of a rank's losses are listed, and of the sequences behind each: after the first one, all others tend to be broken."""

MAX_NAMES = 5
"""The most names that a list shows, and the most losses of all ranks."""


@dataclass(frozen=True)
class _Finding:
    """A loss that is not finite: its step, what it is and why, and all that is known, in words."""

    step: int
    verdict: str
    text: str


def not_finite_error(
    comm: Communicator, dataset: Dataset, losses: Sequence[NotFinite], epoch: int, first_step: int
) -> TrainingError:
    """Collective. The error with what every rank found: first the verdict on the first of these losses, then all.

    Args:
        first_step: the number of steps of the whole training before the epoch.
    """

    def findings() -> list[_Finding]:
        return [_finding(loss, dataset, epoch, first_step) for loss in losses[:MAX_LISTED]]

    by_rank = comm.gather(together(comm, findings, name="not_finite_tags"), name="not_finite")
    all_found = [(rank, finding) for rank, of_rank in enumerate(by_rank) for finding in of_rank]
    all_found.sort(key=lambda pair: pair[1].step)
    lines = [f"rank {rank}: {finding.text}" for rank, finding in all_found]
    if len(lines) > MAX_NAMES:
        lines[MAX_NAMES:] = [f"and {len(lines) - MAX_NAMES} more"]
    first_rank, first = all_found[0]
    head = f"train_step: expected finite losses, got {first.verdict}, on rank {first_rank}"
    return TrainingError("\n  ".join([head, *lines, NOT_FINITE_HINT])).on_all_ranks()


def _finding(fault: NotFinite, dataset: Dataset, epoch: int, first_step: int) -> _Finding:
    inputs = _broken_inputs(dataset.at_epoch(epoch), fault.indices)
    cause = "its input" if inputs else "the loss itself"
    fault_text = f"{fault.loss} = {fault.value} in step {fault.step - first_step} of epoch {epoch}"
    why = f"{len(fault.parameters)} parameters are not finite" if fault.parameters else f"{cause} is the cause"
    tags = first_few(dataset.tags(fault.indices), MAX_NAMES)
    broken = first_few(fault.parameters, MAX_NAMES) or f"none, so {cause} is the cause"
    text = f"{fault_text}, sequences {tags}; {inputs or 'its input is finite'}; parameters that are not finite: {broken}"
    return _Finding(fault.step, f"{fault_text}: {why}", text)


def _broken_inputs(dataset: Dataset, indices: Sequence[int]) -> str:
    """The data keys and sequences with NaN or infinity, in words; '' if there are none."""
    faults = []
    for index in indices:
        try:
            arrays = dataset.sequence(index)
        except Exception as error:  # a missing file or the user's code: the known facts are worth reporting anyway
            return f"its input cannot be read again ({error})"
        for key, values in arrays.items():
            if values.dtype.kind == "O" and (problem := finite_problem(values)):
                faults.append(f"{dataset.tags([index])[0]}: {problem}")
            if values.dtype.kind in "fc" and not (finite := numpy.isfinite(values)).all():
                frames = len(values) - int(finite.reshape(len(values), -1).all(axis=1).sum())
                [tag] = dataset.tags([index])
                faults.append(f"{key!r} has NaN or infinity in {frames} of {len(values)} frames of {tag}")
    more = f" and in {len(faults) - MAX_LISTED} more sequences" if len(faults) > MAX_LISTED else ""
    return ", ".join(faults[:MAX_LISTED]) + more
