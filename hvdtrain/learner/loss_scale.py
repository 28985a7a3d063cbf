"""The scale of a float16 loss, and what happens to updates whose gradients are not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import ConfigError, TrainingError
from hvdtrain.runtime.log import say

PATIENCE = 20
"""Updates that may be left out in a row although the scale is below 1, where the config has no number of its own."""

LARGEST = 2.0**126
"""The scale grows no further: it has to be a float32 itself."""


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """How a loss scale moves. The names are those of torch.amp.GradScaler.

    Attributes:
        init_scale: the first factor.
        growth_factor, growth_interval: the factor grows by this after so many updates in a row with finite gradients.
        backoff_factor: it is multiplied by this when a gradient is no finite number.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000


class LossScale:
    """Losses are multiplied by `scale` before backward, gradients are divided by it before they are used.

    Where gradients are reduced, they are judged afterwards: so all ranks leave out the same updates and keep the same scale.
    """

    def __init__(self, options: ScaleOptions) -> None:
        self.scale = float(options.init_scale)
        self._options = options
        self._good = 0

    @property
    def explains_overflow(self) -> bool:
        """Whether a gradient that is no finite number may be so because of the scale."""
        return self.scale >= 1.0

    def update(self, finite: bool) -> bool:
        """Be told whether the scaled gradients of an update were finite numbers. Returns whether the scale has changed."""
        before = self.scale
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.scale *= self._options.backoff_factor
        elif self._good >= self._options.growth_interval:
            self._good = 0
            self.scale = min(LARGEST, self.scale * self._options.growth_factor)
        return self.scale != before

    def state(self) -> dict[str, float]:
        """What a checkpoint holds."""
        return {"scale": self.scale, "good": self._good}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` returned."""
        self.scale, self._good = float(state["scale"]), int(state["good"])


def parse_scale_options(options: Mapping[str, Any], where: str) -> ScaleOptions | None:
    """GradScaler's options; None where they turn it off. Raises: ConfigError, with all problems."""
    named = dict(options)
    enabled = named.pop("enabled", True)
    rules: dict[str, tuple[str, float, float]] = {
        "init_scale": ("a positive number", 0.0, float("inf")),
        "growth_factor": ("a number above 1", 1.0, float("inf")),
        "backoff_factor": ("a number between 0 and 1", 0.0, 1.0),
        "growth_interval": ("a positive whole number", 0.0, float("inf")),
    }
    problems = [f"{where}.{name}: expected one of {', '.join(rules)}, enabled" for name in named if name not in rules]
    for name, value in named.items():
        words, low, high = rules.get(name, ("", float("-inf"), float("inf")))
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name in rules and (
            not is_number or not low < value < high or (name == "growth_interval" and not float(value).is_integer())
        ):
            problems.append(f"{where}.{name}: expected {words}, got {value!r}")
    if not isinstance(enabled, bool):
        problems.append(f"{where}.enabled: expected True or False, got {enabled!r}")
    if problems:
        raise ConfigError(problems)
    return ScaleOptions(**named) if enabled else None


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
