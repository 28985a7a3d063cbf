"""The optimizers of a Brain: their rates, which its hooks set, and which of them take part in an update."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.errors import ConfigError
from hvdtrain.learner.torch.several_optimizers import SeveralOptimizers
from hvdtrain.plugins.other_trainer.rates import GroupRates, parameters_of


class Optimizers(GroupRates):
    """What `init_optimizers` makes. Raises: ConfigError, if it makes none."""

    def __init__(self, brain: Any) -> None:
        super().__init__()
        self._brain = brain
        brain.optimizers_dict = None
        brain.init_optimizers()
        self._by_name = brain.optimizers_dict or {"optimizer": getattr(brain, "optimizer", None)}
        members = list(self._by_name.values())
        if None in members:
            raise ConfigError.of("unsupported", "brain: expected an optimizer from init_optimizers, got none")
        if not hasattr(brain, "optimizer"):
            brain.optimizer = members[0]
        self.take(members[0] if len(members) == 1 else SeveralOptimizers(members), brain.modules.parameters())
        if len(self.rates) > 1:
            for member in members:
                member.register_step_pre_hook(lambda *_: self.set_rates())

    def change_gradients(self, clips: bool) -> None:
        """Leave out those that are frozen, and clip the gradients of the first group of each of the others, as there."""
        active = self._brain.freeze_optimizers(self._by_name)
        for name, member in self._by_name.items():
            if name not in active:
                for parameter in parameters_of(member):
                    parameter.grad = None
            elif clips:
                torch.nn.utils.clip_grad_norm_(member.param_groups[0]["params"], self._brain.max_grad_norm)
