"""The rates of an optimizer's groups, which another trainer's code sets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvdtrain.learner.torch.update import HAS_OWN_RATES


class GroupRates:
    """Each group of the optimizer has its own rate; hvdtrain gives all of them that of the first one.

    Attributes:
        optimizer: None until there is one; several as one.
        rates: of its groups, as the other trainer's code has set them.
    """

    optimizer: Any = None

    def __init__(self) -> None:
        self.rates: list[float] = []

    def take(self, optimizer: Any, model_parameters: Iterable[Any]) -> None:
        """Parameters of the model that the optimizer does not have are not trained, as there."""
        self.optimizer = optimizer
        setattr(optimizer, HAS_OWN_RATES, True)
        optimized = set(map(id, parameters_of(optimizer)))
        for parameter in model_parameters:
            if id(parameter) not in optimized:
                parameter.requires_grad_(False)
        self.note_rates()

    def note_rates(self) -> None:
        """Take over the rates of the groups, which hooks may have set."""
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def next_rate(self) -> float:
        """That of the first group, with which hvdtrain begins an update."""
        self.note_rates()
        return self.rates[0]

    def set_rates(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate


def parameters_of(*optimizers: Any) -> list[Any]:
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]
