"""What is known of a finished epoch, the lines it is told in, and which ranks held up the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from hvdtrain.runtime.scores import text
from hvdtrain.runtime.timer import clock_text


@dataclass(frozen=True)
class EpochReport:
    """Everything that is known of a finished epoch.

    Attributes:
        computing: share of the epoch's wall time that went into training steps, collectives included; rank 0's.
        scores: by key, such as 'train_loss_ce' or 'dev_loss_wer' (errors are called losses here, as RETURNN calls them).
        padding: by data key, the share of the frames in the epoch's batches that was padding (where every rank goes through
            all data in an order of its own: in rank 0's batches).
        loss_scale: what the loss is multiplied by at the end of the epoch, where it is.
        seconds: by rank, seconds under each name (data wait, compute, communication, parameter sync, evaluation, saving, rest).
    """

    epoch: int
    steps: int
    global_step: int
    elapsed: float
    computing: float
    learning_rate: float
    num_sequences: int
    scores: Mapping[str, float]
    padding: Mapping[str, float] = field(default_factory=dict)
    seconds: list[Mapping[str, float]] = field(default_factory=list)
    loss_scale: float | None = None

    def lines(self, datasets: Sequence[str]) -> list[tuple[int, str]]:
        """What the log says of the epoch: lines with the verbosity from which each is shown.

        Args:
            datasets: those that were evaluated, by name.
        """
        start = f"train epoch {self.epoch}"
        padding = ", ".join(f"{name} {share:.1%}" for name, share in self.padding.items())
        lines = [(3, self.line), (4, f"{start}, padding: {padding}")]
        lines += [(5, f"{start}, seconds: {row}") for row in table(self.seconds)]
        late = held_up(self.seconds)
        lines += [(2, f"{start}: {late}")] if late else []
        return lines + [(1, line) for line in self._score_lines(datasets)]

    @property
    def line(self) -> str:
        """The line RETURNN's users look at."""
        return (
            f"train epoch {self.epoch}, finished after {self.steps} steps, {clock_text(self.elapsed)} elapsed "
            f"({self.computing:.1%} computing time)"
        )

    def _score_lines(self, datasets: Sequence[str]) -> list[str]:
        """One line for training, one for all evaluations."""

        def of(dataset: str) -> str:
            start = f"{dataset}_loss_"
            return text({name.removeprefix(start): value for name, value in self.scores.items() if name.startswith(start)})

        total = sum(self.seconds[0].values()) if self.seconds else self.elapsed
        lines = [f"epoch {self.epoch} score: {of('train')}, elapsed: {clock_text(total)}"]
        evaluations = "; ".join(f"{dataset}: {of(dataset)}" for dataset in datasets)
        return lines + ([f"epoch {self.epoch} evaluation: {evaluations}"] if evaluations else [])


class Reporter(Protocol):
    """Somebody who wants to know about finished epochs."""

    def epoch(self, report: EpochReport) -> None: ...


OWN = {"data wait": "waiting for data", "compute": "computing"}
"""What a rank does for itself in a training step, and how it is told."""

WAITING = ("communication", "parameter sync")
"""Where a rank waits for the others."""

SHARE = 0.15
"""A rank is named from so much more time than the others' on: below, batches of chance lengths make as much."""

SECONDS = 0.2
"""And from so many seconds on: a short epoch says nothing."""


def held_up(seconds: Sequence[Mapping[str, float]]) -> str | None:
    """Which rank held the others up, by how much, and whether data or computing is the cause; None where none did.

    Args:
        seconds: by rank, seconds of an epoch under each name.

    >>> held_up([{"compute": 8.0, "communication": 3.1}, {"compute": 11.0, "communication": 0.1}])
    'rank 1 held the others up by 3.0 s (38%): computing took 11.0 s, against 8.0 s'
    >>> held_up([{"compute": 8.0, "communication": 0.2}, {"compute": 8.3, "communication": 0.1}])
    """
    if len(seconds) < 2:
        return None
    own = [sum(rank.get(name, 0.0) for name in OWN) for rank in seconds]
    slowest = max(range(len(own)), key=own.__getitem__)
    others = [rank for number, rank in enumerate(seconds) if number != slowest]
    usual = median(time for number, time in enumerate(own) if number != slowest)
    late = own[slowest] - usual
    waited = median(_waiting(rank) for rank in others) - _waiting(seconds[slowest])
    if late < SECONDS or late < SHARE * usual or waited < late / 2:
        return None
    typical = {name: median(rank.get(name, 0.0) for rank in others) for name in OWN}
    cause = max(OWN, key=lambda name: seconds[slowest].get(name, 0.0) - typical[name])
    return (
        f"rank {slowest} held the others up by {late:.1f} s ({late / usual:.0%}): {OWN[cause]} took "
        f"{seconds[slowest].get(cause, 0.0):.1f} s, against {typical[cause]:.1f} s"
    )


def table(seconds: Sequence[Mapping[str, float]]) -> list[str]:
    """The ranks' seconds under each name, a rank a row.

    >>> table([{"compute": 8.25, "rest": 1}, {"compute": 7, "rest": 2.25}])
    ['rank 0: compute 8.2, rest 1.0', 'rank 1: compute 7.0, rest 2.2']
    """
    rows = [", ".join(f"{name} {value:.1f}" for name, value in rank.items()) for rank in seconds]
    return [f"rank {number}: {row}" for number, row in enumerate(rows)]


def _waiting(rank: Mapping[str, float]) -> float:
    return sum(rank.get(name, 0.0) for name in WAITING)
