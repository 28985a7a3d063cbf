"""Updates that are left out because a gradient is no finite number, whatever the framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdtrain.errors import TrainingError
from hvdtrain.learner.loss_scale import PATIENCE, LossScale
from hvdtrain.log import say


class BrokenUpdates:
    """Says whether an update is applied, and counts those that are not.

    Args:
        skips: up to so many in a row are left out; None: only those that the scale of the loss explains.
        scale: of the loss; None: it is not scaled.
        same_on_all_ranks: gradients are, as they were reduced; so all ranks get the same answers.
    """

    def __init__(self, skips: int | None, scale: LossScale | None, same_on_all_ranks: bool) -> None:
        self._skips = skips
        self._scale = scale
        self._same_on_all_ranks = same_on_all_ranks
        self._skipped = 0

    @property
    def may_be_left_out(self) -> bool:
        """Whether somebody has to look at the gradients."""
        return self._skips is not None or self._scale is not None

    def is_applied(self, finite: bool, step: int, broken: Callable[[], Sequence[str]]) -> bool:
        """Whether to apply an update; be told of each, once.

        Args:
            finite: all gradients are finite numbers.
            step: updates done before it in the whole training.
            broken: the names of the parameters whose gradients are not.

        Raises:
            TrainingError: too many updates in a row were left out.
        """
        explained = self._scale is not None and self._scale.explains_overflow
        if self._scale is not None and self._scale.update(finite):
            why = "" if finite else ": a gradient is no finite number, the update is left out"
            say(5, f"loss scale {self._scale.scale:g} from step {step + 1} of the training on{why}")
        if finite:
            self._skipped = 0
        elif not explained:
            self._skipped += 1
            if self._skipped > self._limit:
                raise self._error(step, broken())
        return finite

    @property
    def _limit(self) -> int:
        return PATIENCE if self._skips is None else self._skips

    def _error(self, step: int, names: Sequence[str]) -> TrainingError:
        scale = "" if self._scale is None else f" and the loss scale had come down to {self._scale.scale:g}"
        error = TrainingError(
            f"num_allowed_consec_invalid_gradient_steps: expected finite gradients after {self._limit} were left out{scale}, "
            f"got others in step {step} of the training, for {', '.join(names)}"
        )
        error.on_every_rank = self._same_on_all_ranks
        return error
