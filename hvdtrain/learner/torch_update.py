"""What happens between reduced gradients and new parameters, with PyTorch."""

from __future__ import annotations

import torch

from hvdtrain.errors import TrainingError
from hvdtrain.learner.torch_noise import GradientNoise
from hvdtrain.learner.torch_sharded import ShardedOptimizer

Optimizer = torch.optim.Optimizer | ShardedOptimizer


class Update:
    """The optimizer's step, and what comes before it: leaving broken gradients out, noise, clipping, the learning rate.

    Args:
        skips: leave out updates of which a gradient is no finite number, up to so many in a row; None: leave none out.
        same_on_all_ranks: gradients are, as they were reduced.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        *,
        clip_global_norm: float | None,
        clip_value: float | None,
        noise: GradientNoise | None,
        skips: int | None,
        same_on_all_ranks: bool,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._clip_global_norm = clip_global_norm
        self._clip_value = clip_value
        self._noise = noise
        self._skips = skips
        self._skipped = 0
        self._same_on_all_ranks = same_on_all_ranks

    def apply(self, learning_rate: float, step: int) -> None:
        """Apply the reduced gradients, and drop them.

        Args:
            step: steps done before this one in the whole training.

        Raises:
            TrainingError: too many updates in a row were left out.
        """
        if self._skips is None or self._is_finite(self._skips, step):
            if self._noise is not None:
                self._noise.add(self._trained, step)
            self._clip()
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate * group.get("learning_rate_multiplier", 1.0)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _clip(self) -> None:
        if self._clip_value is not None:
            torch.nn.utils.clip_grad_value_(self._trained, self._clip_value)
        if self._clip_global_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._trained, self._clip_global_norm)

    def _is_finite(self, skips: int, step: int) -> bool:
        """Whether all gradients are finite numbers. Where they were reduced, all ranks come to the same answer.

        Raises:
            TrainingError: too many updates in a row were left out.
        """
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        norms = torch._foreach_norm(gradients, float("inf"))
        if bool(torch.stack(norms).isfinite().all()):
            self._skipped = 0
            return True
        self._skipped += 1
        if self._skipped > skips:
            names = [name for name, parameter in self._model.named_parameters() if _is_broken(parameter.grad)]
            error = TrainingError(
                f"num_allowed_consec_invalid_gradient_steps: expected finite gradients after {skips} were left out, "
                f"got others in step {step} of the training, for {', '.join(names)}"
            )
            error.on_every_rank = self._same_on_all_ranks
            raise error
        return False


def _is_broken(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and not bool(gradient.isfinite().all())
