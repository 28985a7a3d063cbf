"""Updates that are skipped because a gradient is not finite, decided on the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvdtrain.learner.precision import LARGEST, GradientCheck, LossScale
from hvdtrain.learner.torch.device import OnTheWay


def skips_by_itself(optimizer: object) -> bool:
    """Whether an optimizer skips an update where its `found_inf` is 1, on the device: torch.optim's with fused=True do."""
    return (
        isinstance(optimizer, torch.optim.Optimizer)
        and getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused") for group in optimizer.param_groups)
    )


@dataclass(frozen=True)
class _Decided:
    """An update that the device decided on."""

    finite: OnTheWay
    names: Sequence[str]
    step: int


class DeviceSkips:
    """Lets the device decide whether an update is skipped, and tell the host one update later.

    The loss scale then follows the gradients on the device. The host's `check` and `scale` repeat that one update late, with the
    same arithmetic, for the log, the checkpoint, and the error if too many updates in a row are skipped. All ranks read an
    update's flags before the next update, so that they raise this error together.

    Args:
        check: counts the skipped updates, and keeps the host's loss scale.
        scale: of the loss; None: it is not scaled.
    """

    def __init__(self, check: GradientCheck, scale: LossScale | None, device: torch.device) -> None:
        self._check = check
        self._scale = scale
        self._device = device
        self._decided: _Decided | None = None
        self._state: tuple[torch.Tensor, torch.Tensor] | None = None  # the scale, and the number of good updates: float64 scalars
        self.loss_factor: torch.Tensor | None = None
        """The scale as the losses get it: a float32 scalar on the device; None: the host's is up to date."""

    def decide(self, optimizer: torch.optim.Optimizer, finite: torch.Tensor, names: Sequence[str], step: int) -> None:
        """Make the optimizer's next step skip itself if a gradient is not finite.

        Args:
            finite: whether each gradient is; bool of shape (gradients,).
            names: of the parameters that have these gradients.
            step: steps done in the whole training before the last step of this update.

        Raises:
            TrainingError: too many updates in a row were skipped before this one.
        """
        self.settle()
        all_finite = finite.all()
        optimizer.found_inf = (~all_finite).float()  # type: ignore[attr-defined]  # read by fused optimizers, as by GradScaler's
        if self._scale is not None:
            self._adapt(self._scale, all_finite)
        self._decided = _Decided(OnTheWay(finite), names, step)

    def settle(self) -> None:
        """Read what the device decided last. Raises: TrainingError, if too many updates in a row were skipped."""
        decided, self._decided = self._decided, None
        if decided is not None:
            finite = decided.finite.values().tolist()
            broken = [name for name, is_finite in zip(decided.names, finite, strict=True) if not is_finite]
            self._check.is_applied(not broken, decided.step, lambda: broken)

    def _adapt(self, scale: LossScale, finite: torch.Tensor) -> None:
        """What `LossScale.update` does, on the device."""
        if self._state is None:
            before = scale.state()
            self._state = self._scalar(before["scale"]), self._scalar(before["good"])
        factor, good = self._state
        good = (good + 1) * finite
        grows = good >= scale.options.growth_interval
        larger = torch.where(grows, (factor * scale.options.growth_factor).clamp(max=LARGEST), factor)
        factor = torch.where(finite, larger, factor * scale.options.backoff_factor)
        self._state = factor, good * ~grows
        self.loss_factor = factor.float()

    def _scalar(self, value: float) -> torch.Tensor:
        return torch.full((), value, dtype=torch.float64, device=self._device)
