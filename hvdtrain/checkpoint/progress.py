"""Where a training stands: what a checkpoint holds beside the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hvdtrain.data.identity import Identity
from hvdtrain.data.plan.order import ORDER_VERSION
from hvdtrain.runtime.scores import Scores
from hvdtrain.schedule.history import EpochRecord, UsedRates


@dataclass
class EpochProgress:
    """How far the current epoch is.

    Attributes:
        epoch: counted from 1.
        first_step: steps of the whole training that were done when the epoch began.
        position: batches done, summed over all ranks; where every rank goes through all data, each rank's own.
        trained: all batches are done and all ranks have the same model again; what is left is evaluating.
        elapsed: seconds that the epoch has taken, up to the last stop or checkpoint.
        computing: the seconds of these spent in training steps.
        scores: the scores of the batches done, as far as the ranks have gathered them.
        rates: the learning rates of the updates done.
        syncs: syncs of the ranks' parameters.
        sent: bytes that rank 0 has sent in these and as gradients.
        fingerprints: checksums of the epoch's plan, by rank.
        order_version: the `ORDER_VERSION` (`data/plan/order.py`) that the plan was made with.
    """

    epoch: int
    first_step: int
    position: int = 0
    trained: bool = False
    elapsed: float = 0.0
    computing: float = 0.0
    syncs: int = 0
    sent: int = 0
    scores: Scores = field(default_factory=Scores)
    rates: UsedRates = field(default_factory=UsedRates)
    fingerprints: list[int] = field(default_factory=list)
    order_version: int = ORDER_VERSION


@dataclass
class Progress:
    """Attributes:
    step: steps done in the whole training (a step is a batch of every rank).
    epoch: the last finished epoch.
    history: what is known of the finished epochs, oldest first; those before an imported model are not in it.
    current: the epoch after it, if it has begun.
    report: the last finished epoch's line in scores.jsonl.
    data: by name of a dataset, what identifies its data.
    """

    step: int = 0
    epoch: int = 0
    history: list[EpochRecord] = field(default_factory=list)
    current: EpochProgress | None = None
    report: dict[str, Any] | None = None
    data: dict[str, list[Identity]] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """As plain numbers, texts, lists and dicts. `epoch` is that of the checkpoint's name: finished or current."""
        current = None
        if self.current is not None:
            current = {**vars(self.current), "scores": self.current.scores.state(), "rates": asdict(self.current.rates)}
        return {
            "epoch": self.epoch if self.current is None else self.current.epoch,
            "step": self.step,
            "history": [asdict(record) for record in self.history],
            "within": current,
            "report": self.report,
            "data": self.data,
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Progress:
        """What `state` returned; of another program's checkpoint (RETURNN's has an epoch and a step) what there is."""
        current = None
        if state.get("within") is not None:
            stored = {"order_version": 1, **state["within"]}  # version 1 was not stored
            rates = UsedRates(**stored.get("rates", {}))
            current = EpochProgress(**{**stored, "scores": Scores.from_state(stored["scores"]), "rates": rates})
        return Progress(
            step=int(state.get("step") or 0),
            epoch=int(state.get("epoch") or 0) - (current is not None),
            history=[EpochRecord(**record) for record in state.get("history") or []],
            current=current,
            report=state.get("report"),
            data=state.get("data") or {},
        )

    def describe(self) -> str:
        """Where training stands, in words.

        >>> Progress(step=20, epoch=2).describe()
        'after epoch 2, step 20'
        >>> Progress(step=23, epoch=2, current=EpochProgress(epoch=3, first_step=20)).describe()
        'in epoch 3, after its step 3'
        """
        if self.current is None:
            return f"after epoch {self.epoch}, step {self.step}"
        if self.current.trained:
            return f"with the evaluation of epoch {self.current.epoch}"
        return f"in epoch {self.current.epoch}, after its step {self.step - self.current.first_step}"
