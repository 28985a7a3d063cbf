"""What is known of a finished epoch, and the lines it is told in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hvdtrain.report.ranks import held_up, table
from hvdtrain.scores import text
from hvdtrain.timer import clock_text


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
