"""The factor that keeps small float16 gradients from becoming zero, found by trying (after Micikevicius et al., 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import ConfigError

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
