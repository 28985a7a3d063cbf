"""Where a training stands: what a checkpoint holds beside the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hvdtrain.runtime.scores import Scores
from hvdtrain.schedule.history import EpochRecord


@dataclass
class Within:
    """An epoch that is under way.

    Attributes:
        epoch: counted from 1.
        first_step: steps done before it in the whole training.
        position: batches done, over all ranks; where every rank goes through all data, each rank's own.
        trained: all batches are done and the ranks' models are one again; what is left is evaluating.
        elapsed: seconds that the epoch took up to the last stop; computing: those of them in training steps.
        scores: those of the batches done, as far as the ranks have brought them together.
        fingerprints: checksums of the epoch's plan, by rank.
    """

    epoch: int
    first_step: int
    position: int = 0
    trained: bool = False
    elapsed: float = 0.0
    computing: float = 0.0
    scores: Scores = field(default_factory=Scores)
    fingerprints: list[int] = field(default_factory=list)


@dataclass
class Progress:
    """Attributes:
    step: steps done in the whole training (a step is a batch of every rank).
    epoch: the last finished epoch.
    history: what is known of the finished epochs, oldest first; those before an imported model are not in it.
    within: the epoch after it, where that is under way.
    report: what was told of the last finished epoch, as scores.jsonl has it.
    """

    step: int = 0
    epoch: int = 0
    history: list[EpochRecord] = field(default_factory=list)
    within: Within | None = None
    report: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """As plain numbers, texts, lists and dicts. `epoch` is that of the checkpoint's name: finished or under way."""
        within = None if self.within is None else {**vars(self.within), "scores": self.within.scores.state()}
        return {
            "epoch": self.epoch if self.within is None else self.within.epoch,
            "step": self.step,
            "history": [asdict(record) for record in self.history],
            "within": within,
            "report": self.report,
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Progress:
        """What `state` returned; of another program's checkpoint (RETURNN's has an epoch and a step) what there is."""
        within = None
        if state.get("within") is not None:
            within = Within(**{**state["within"], "scores": Scores.from_state(state["within"]["scores"])})
        return Progress(
            step=int(state.get("step") or 0),
            epoch=int(state.get("epoch") or 0) - (within is not None),
            history=[EpochRecord(**record) for record in state.get("history") or []],
            within=within,
            report=state.get("report"),
        )
