"""Where a training is, and which weights its model has. The engine says so; all others read it here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

from hvdtrain.checkpoint.progress import Progress
from hvdtrain.learner.reducer import EpochSync
from hvdtrain.learner.state_base import StateBase


class Phase:
    """What a training is doing.

    Attributes:
        dataset: the name of the dataset that is evaluated; None: none is.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.dataset: str | None = None

    @contextmanager
    def evaluating(self, dataset: str | None) -> Iterator[None]:
        """Inside the `with` block, a dataset is evaluated; None: the evaluation is interrupted."""
        before, self.dataset = self.dataset, dataset
        try:
            yield
        finally:
            self.dataset = before

    def __str__(self) -> str:
        """The step that is trained, in words."""
        current = self._progress.current
        return "training" if current is None else f"epoch {current.epoch}, step {self._progress.step - current.first_step}"

    @property
    def epoch(self) -> int:
        """The epoch that is being trained or evaluated, or else the last one, counted from 1."""
        current = self._progress.current
        return self._progress.epoch if current is None else current.epoch

    @property
    def step(self) -> int:
        """The number of steps done in the whole training."""
        return self._progress.step

    @property
    def is_trained(self) -> bool:
        """Whether all steps of the epoch are done."""
        return self._progress.current is None or self._progress.current.trained

    @property
    def is_within_epoch(self) -> bool:
        """Whether this is an evaluation within an epoch."""
        return self.dataset is not None and not self.is_trained


class EvaluatedModel:
    """The model that is evaluated and saved: the average of the ranks' models and, with `ema_decay`, over time."""

    def __init__(self, state: StateBase, sync: EpochSync) -> None:
        self._state = state
        self._sync = sync
        self._is_of_all_ranks = False
        self._unchanged: dict[str, Any] = {}  # the model's tensors, while it has those that a callback has put into it
        self.depth = 0
        """In how many blocks of `use` the training is."""

    @contextmanager
    def use(self) -> Iterator[None]:
        """Collective. Inside the `with` block, which may be within another one, the model is this one."""
        with ExitStack() as stack:
            if not self._is_of_all_ranks:
                self._sync.flush(self._state)
                stack.enter_context(self._sync.averaged_model(self._state))
                stack.callback(setattr, self, "_is_of_all_ranks", False)
                self._is_of_all_ranks = True
            stack.enter_context(self._state.averaged_weights())
            self.depth += 1
            stack.callback(setattr, self, "depth", self.depth - 1)
            stack.push(self._undo_changes)
            yield

    @contextmanager
    def noting_changes(self) -> Iterator[None]:
        """Inside the `with` block, callbacks may put other weights into the model, which they take out after the evaluation."""
        before = self._unchanged or deepcopy(dict(self._state.model_tensors()))
        yield
        now = self._state.model_tensors()
        if any(bool((now[name] != tensor).any()) for name, tensor in before.items()):
            self._unchanged = before

    def without_changes(self) -> AbstractContextManager[None]:
        """Inside the `with` block, for a checkpoint within an evaluation, the model is as it was before callbacks changed it."""
        return self._state.other_model(self._unchanged) if self._unchanged else nullcontext()

    def _undo_changes(self, kind: type[BaseException] | None, *_: object) -> None:
        """Take out what callbacks have put into the model, where a stop interrupts the evaluation."""
        if kind is not None and self._unchanged:
            self._state.set_model(self._unchanged)
            self.forget_changes()

    def forget_changes(self) -> None:
        """After an evaluation."""
        self._unchanged = {}
