"""The optimizers of a Brain: their rates, which its hooks set, and which of them take part in an update."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.errors import ConfigError
from hvdtrain.learner.torch.several_optimizers import AnyOptimizer, SeveralOptimizers


class Optimizers:
    """What `init_optimizers` makes. Parameters that none of them has are not trained, as there.

    Attributes:
        whole: all of them as one.

    Raises:
        ConfigError: it makes none.
    """

    def __init__(self, brain: Any) -> None:
        self._brain = brain
        brain.optimizers_dict = None
        brain.init_optimizers()
        self._named = brain.optimizers_dict or {"optimizer": getattr(brain, "optimizer", None)}
        members = list(self._named.values())
        if None in members:
            raise ConfigError.of("unsupported", "brain: expected an optimizer from init_optimizers, got none")
        self.whole: AnyOptimizer = members[0] if len(members) == 1 else SeveralOptimizers(members)
        if not hasattr(brain, "optimizer"):
            brain.optimizer = members[0]
        optimized = {id(parameter) for group in self.whole.param_groups for parameter in group["params"]}
        for parameter in brain.modules.parameters():
            if id(parameter) not in optimized:
                parameter.requires_grad_(False)
        self._rates: list[float] = []
        if len(self.whole.param_groups) > 1:
            for member in members:
                member.register_step_pre_hook(lambda *_: self._set_rates())

    def note_rates(self) -> None:
        """Take over the rates of the groups, which hooks may have set."""
        self._rates = [float(group["lr"]) for group in self.whole.param_groups]

    def _set_rates(self) -> None:
        """Set the rates of the groups, each its own."""
        for group, rate in zip(self.whole.param_groups, self._rates, strict=True):
            group["lr"] = rate

    def change_gradients(self, clips: bool) -> None:
        """Leave out those that are frozen, and clip the gradients of the first group of each of the others, as there."""
        active = self._brain.freeze_optimizers(self._named)
        for name, member in self._named.items():
            if name not in active:
                for group in member.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
            elif clips:
                torch.nn.utils.clip_grad_norm_(member.param_groups[0]["params"], self._brain.max_grad_norm)
