"""From reduced gradients to new parameters: the loss scale, the check for finite gradients, noise, clipping, the optimizer.

On a GPU, the device decides whether an update is skipped because a gradient is not finite, without waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any

import torch

from hvdtrain.data.randomness import noise_seeds
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError
from hvdtrain.learner.optimizer import UpdateGradients
from hvdtrain.learner.precision import LARGEST, GradientCheck, LossScale
from hvdtrain.learner.torch.assembly import DividedOptimizer, Optimizer
from hvdtrain.learner.torch.device import AsyncCopy
from hvdtrain.learner.torch.optimizer import complete_momentum, plain_step
from hvdtrain.learner.torch.optimizer_state import check_plain
from hvdtrain.learner.torch.parameter_groups import take_multipliers
from hvdtrain.learner.torch.several_optimizers import members_of
from hvdtrain.learner.torch.tensors import named_trained

PLAIN_ZERO_GRAD = torch.optim.Optimizer.zero_grad
HAS_OWN_RATES = "has_own_rates"  # an attribute of an optimizer whose groups have in each step the rates that other code sets


def skips_by_itself(optimizer: object) -> bool:
    """Whether an optimizer itself skips an update on the device if its `found_inf` is 1, as torch.optim's do with fused=True."""
    return (
        isinstance(optimizer, torch.optim.Optimizer)
        and getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused") for group in optimizer.param_groups)
    )


@dataclass(frozen=True)
class _DeviceDecision:
    """An update whose outcome was decided on the device."""

    finite: AsyncCopy
    names: Sequence[str]
    step: int


class DeviceSkips:
    """Lets the device decide whether an update is skipped; the host learns it one update later.

    The loss scale then adapts on the device. The host's `check` and `scale` repeat it with the same arithmetic, for the log, the
    checkpoint, and the error about too many consecutive skipped updates, which all ranks raise together before the next one.

    Args:
        check: counts skipped updates, and keeps the host's loss scale.
    """

    def __init__(self, check: GradientCheck, device: torch.device) -> None:
        self._check = check
        self._device = device
        self._decided: _DeviceDecision | None = None
        self._state: tuple[torch.Tensor, torch.Tensor] | None = None  # the scale, and the number of good updates: float64 scalars
        self.loss_factor: torch.Tensor | None = None
        """The scale as the losses get it: a float32 scalar on the device; None: the host's is up to date."""

    def decide(self, optimizer: torch.optim.Optimizer, finite: torch.Tensor, names: Sequence[str], step: int) -> None:
        """Make the optimizer's next step skip itself if a gradient is not finite.

        Args:
            finite: whether each gradient is finite; bool of shape (gradients,).
            names: the parameters of these gradients.
            step: the number of training steps done before the last step of this update.

        Raises:
            TrainingError: too many consecutive updates were skipped before this one.
        """
        self.flush()
        all_finite = finite.all()
        optimizer.found_inf = (~all_finite).float()  # type: ignore[attr-defined]  # as GradScaler does for fused optimizers
        if self._check.scale is not None:
            self._adapt(self._check.scale, all_finite)
        self._decided = _DeviceDecision(AsyncCopy(finite), names, step)

    def flush(self) -> None:
        """Read the device's last decision. Raises: TrainingError, if too many consecutive updates were skipped."""
        decided, self._decided = self._decided, None
        if decided is not None:
            finite = decided.finite.values().tolist()
            broken = [name for name, is_finite in zip(decided.names, finite, strict=True) if not is_finite]
            self._check.decide(not broken, decided.step, lambda: broken)

    def _adapt(self, scale: LossScale, finite: torch.Tensor) -> None:
        """`LossScale.update` on the device."""
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


@dataclass(frozen=True)
class Skips:
    """What decides whether an update is skipped.

    Attributes:
        check: on the host.
        on_device: on the device, if the optimizer supports it; None: the host always decides.
    """

    check: GradientCheck
    on_device: DeviceSkips | None = None


class Update:
    """One optimizer step, and the changes to the gradients before it.

    Args:
        change: changes the gradients before they are applied; None: nothing does.
        skips: decides whether an update is skipped.
        noise: the noise that `change` may add.
        seed: seeds the random numbers that the optimizer may draw in a step; None: it draws none.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        change: Callable[[UpdateGradients], None] | None,
        skips: Skips,
        noise: GradientNoise,
        seed: Callable[[int], None] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._trained = named_trained(model)
        self._multipliers = take_multipliers(optimizer.param_groups)
        self._change = change
        self._check = skips.check
        self._noise = noise
        self._on_device = skips.on_device
        self._seed = seed
        # That of PyTorch's optimizers does nothing else, but in a range for profilers: longer than a small step's backward.
        self._inner = optimizer.inner if isinstance(optimizer, DividedOptimizer) else optimizer
        self._members = list(members_of(self._inner))
        self._drops_plainly = not isinstance(optimizer, DividedOptimizer) and all(
            getattr(type(member), "zero_grad", None) is PLAIN_ZERO_GRAD for member in self._members
        )
        self._has_applied = False  # whether an update was applied, so that the optimizer's state is complete
        self._has_own_rates = getattr(self._inner, HAS_OWN_RATES, False)
        self._rates: list[tuple[Any, Any]] = []  # the groups of the last update, of which a load makes others, and their rates
        self._norms_sent: list[AsyncCopy] = []  # the gradients' norms of at most two updates, oldest first

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    @property
    def loss_factor(self) -> float | torch.Tensor:
        """The factor on all losses before backward."""
        if self._on_device is not None and self._on_device.loss_factor is not None:
            return self._on_device.loss_factor
        return self._check.factor

    def flush(self) -> None:
        """Read the device's decision about the last update. Raises: TrainingError, as in `apply`."""
        if self._on_device is not None:
            self._on_device.flush()

    def gradient_norm(self) -> float | None:
        """The newest global norm of the gradients before clipping that has arrived from the device; None: there is none."""
        arrived = [norm for norm in self._norms_sent if norm.has_arrived()]
        return float(arrived[-1].values()) if arrived else None

    def gradients(self) -> Iterator[tuple[str, Array]]:
        """The reduced gradients that `apply` will apply on this rank, by parameter name, before noise and clipping: all of them,
        or a sharded optimizer's share; float32."""
        ids = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        scale = float(self.loss_factor)
        for name, parameter in self._trained.items():
            if id(parameter) in ids:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                wide = gradient if gradient.is_complex() else gradient.float()
                yield name, (wide / scale).cpu().numpy()

    def apply(self, learning_rate: float, step: int) -> None:
        """Apply the reduced gradients and drop them.

        Args:
            step: the number of training steps done before the last step of this update.

        Raises:
            TrainingError: too many consecutive updates were skipped; if the device decides, before this one.
            ConfigError: something else has set the rate.
        """
        groups = self._optimizer.param_groups
        if not self._has_own_rates:
            self._check_rates(groups, learning_rate)
        if all(parameter.grad is None for parameter in self._trained.values()):  # all ranks left out their batches (skip_broken)
            return
        if self._check.scale is not None:
            torch._foreach_div_(self._gradients(), self.loss_factor)
        if not self._check.is_needed or self._decide_to_apply(step):
            self._change_gradients(step)
            for group, multiplier in zip(groups, self._multipliers, strict=True):
                group["lr"] = learning_rate * multiplier
            if self._seed is not None:
                self._seed(step)
            for member in self._members:
                complete_momentum(member)
            if self._drops_plainly:
                for member in self._members:
                    plain_step(member)
            else:
                self._optimizer.step()
            if not self._has_applied:
                check_plain(self._inner)
            self._has_applied = True
            self._rates = [(group, group["lr"]) for group in groups]
        self._drop_gradients()

    def _check_rates(self, groups: Sequence[Mapping[str, Any]], learning_rate: float) -> None:
        """Raises: ConfigError, if a group's rate is neither the last update's nor the next one's."""
        for group, (rated, rate), multiplier in zip(groups, self._rates, self._multipliers, strict=False):
            if group is rated and group["lr"] not in (rate, learning_rate * multiplier):
                raise ConfigError.of(
                    "wrong-result",
                    f"optimizer: expected the learning rate {rate:g} of the last update in a group, got {group['lr']:g} (set "
                    "there, such as by a callback or a scheduler of PyTorch's, has no effect: dynamic_learning_rate returns it)",
                )

    def _drop_gradients(self) -> None:
        if not self._drops_plainly:
            self._optimizer.zero_grad(set_to_none=True)
            return
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _decide_to_apply(self, step: int) -> bool:
        """Decide whether to apply the update; True if the optimizer can skip it itself. Until one is applied, the host decides:
        an optimizer creates its state in its first step, and may leave it uninitialized if it skips that."""
        finite = torch.stack(self._norms(float("inf"))).isfinite()  # a gradient is finite if its largest element is
        if self._on_device is not None and self._has_applied and skips_by_itself(self._optimizer):
            self._on_device.decide(self._optimizer, finite, self._with_gradient(), step)  # type: ignore[arg-type]  # not a DividedOptimizer
            return True
        # If gradients were reduced, this is the same on all ranks.
        return self._check.decide(bool(finite.all()), step, self._invalid_names)

    def _change_gradients(self, step: int) -> None:
        if self._change is None:
            return
        gradients = TorchGradients(list(self._trained.values()), self._noise, step, self._norms)
        self._change(gradients)
        may_send = not self._norms_sent or self._norms_sent[-1].has_arrived()  # at most one copy is under way
        if gradients.norm is not None and may_send:
            self._norms_sent = [*self._norms_sent[-1:], AsyncCopy(gradients.norm)]

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._trained.values() if parameter.grad is not None]

    def _with_gradient(self) -> list[str]:
        return [name for name, parameter in self._trained.items() if parameter.grad is not None]

    def _invalid_names(self) -> list[str]:
        """Collective, if the optimizer is sharded. The names of the parameters whose gradients are not finite."""
        norms = self._norms(float("inf"))
        return [name for name, norm in zip(self._with_gradient(), norms, strict=True) if not bool(norm.isfinite())]

    def _norms(self, order: float) -> list[torch.Tensor]:
        """Collective, if the optimizer is sharded. The norm of each gradient."""
        if isinstance(self._optimizer, DividedOptimizer):
            return self._optimizer.norms(list(self._trained.values()), order)
        return list(torch._foreach_norm(self._gradients(), order))


class TorchGradients:
    """The gradients of an update, for `change_gradients`.

    Args:
        step: the number of training steps done before the last step of this update.
        norms: computes the norm of each gradient; over the ranks of a sharded optimizer, which have a share of them each.

    Attributes:
        norm: the global norm before `clip_norm`; None: it was not called.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        noise: GradientNoise,
        step: int,
        norms: Callable[[float], list[torch.Tensor]],
    ) -> None:
        self._parameters = parameters
        self._noise = noise
        self._step = step
        self._norms = norms
        self.norm: torch.Tensor | None = None

    def add_noise(self, deviation: float) -> None:
        self._noise.add(self._parameters, deviation, self._step)

    def divide(self, divisor: Any) -> None:
        torch._foreach_div_([parameter.grad for parameter in self._parameters if parameter.grad is not None], divisor)

    def clip(self, limit: float) -> None:
        torch.nn.utils.clip_grad_value_(self._parameters, limit)

    def clip_norm(self, limit: float) -> None:
        # As PyTorch's clip_grad_norm_, without its search for devices and types, which takes as long as a small layer.
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if not gradients:  # the config's change_gradients has dropped them
            return
        self.norm = torch.linalg.vector_norm(torch.stack(self._norms(2.0)))
        if self.norm.is_cpu and self.norm.item() < CERTAINLY_BELOW * limit:  # to know it, no device has to be waited for
            return
        torch._foreach_mul_(gradients, torch.clamp(limit / (self.norm + 1e-6), max=1.0))


CERTAINLY_BELOW = 0.999
"""The share of a limit below which no rounding makes the factor less than 1, by which nothing would change."""

MAX_DEVIATIONS = 2.0
"""The number of standard deviations at which the noise is truncated."""


class GradientNoise:
    """Adds noise from a truncated normal distribution to every element of the gradients.

    (After Neelakantan et al., 2015; truncated and with a constant deviation.) It has a separate generator, so that noise does not
    change the numbers that dropout draws.

    Args:
        seed: returns the training's seed and the rank; with rank None, all ranks add the same noise.
    """

    def __init__(self, seed: Callable[[], tuple[int, int | None]], device: torch.device) -> None:
        self._seed = seed
        self._device = device

    @cached_property
    def _generator(self) -> torch.Generator:
        return torch.Generator(self._device)

    def add(self, parameters: Iterable[torch.nn.Parameter], deviation: float, step: int) -> None:
        """Add noise to the parameters' gradients, in order.

        Args:
            deviation: the standard deviation before truncation; afterwards it is 0.88 of this.
        """
        high, low = noise_seeds(*self._seed(), step).tolist()
        self._generator.manual_seed((high << 32 | low) & (1 << 63) - 1)
        edge = torch.special.erf(torch.tensor(MAX_DEVIATIONS / sqrt(2))).item()
        for parameter in parameters:
            if parameter.grad is not None:
                # Inverse transform sampling: exact, and one draw per element on every device.
                uniform = torch.empty_like(parameter.grad, dtype=torch.float32).uniform_(-edge, edge, generator=self._generator)
                noise = uniform.erfinv_().mul_(deviation * sqrt(2))
                parameter.grad.add_(noise.to(parameter.grad.dtype))
