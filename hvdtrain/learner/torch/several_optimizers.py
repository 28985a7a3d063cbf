"""Several optimizers of PyTorch, each with a part of the parameters, that are used as one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count
from typing import Any

import torch

from hvdtrain.errors import ConfigError


class SeveralOptimizers:
    """Optimizers that together have all trained parameters of a model.

    The groups of all members, one after the other, are the groups of the whole, and the state numbers parameters through all of
    them: what saves, shards or changes an optimizer by its groups needs to know nothing of the members.

    Raises:
        ConfigError: a member saves more than its state and its groups, which would be lost.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.members = list(members)
        for member in self.members:
            more_entries = member.state_dict().keys() - {"state", "param_groups"}
            if more_entries:
                raise ConfigError.of(
                    "unsupported",
                    f"optimizer: expected optimizers that save their state and groups only, got {type(member).__name__}, which "
                    f"also saves {', '.join(sorted(map(str, more_entries)))} (it works as the only optimizer)",
                )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all members: loading a state replaces them, so they are not kept here."""
        return [group for member in self.members for group in member.param_groups]

    def step(self) -> None:
        for member in self.members:
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self.members:
            member.zero_grad(set_to_none=set_to_none)

    def train(self) -> None:
        """Switch the members that have modes to training."""
        for member in self.members:
            if has_modes(member):
                member.train()  # type: ignore[attr-defined]

    def eval(self) -> None:
        """Switch the members that have modes to evaluation."""
        for member in self.members:
            if has_modes(member):
                member.eval()  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """As of a single optimizer."""
        state: dict[int | str, Any] = {}
        groups = []
        first = 0
        for member_number, member in enumerate(self.members):
            member_state = member.state_dict()
            for number, value in member_state["state"].items():  # a text: state of the member as a whole
                state[f"{member_number}.{number}" if isinstance(number, str) else first + number] = value
            groups += [
                {**group, "params": [first + number for number in group["params"]]} for group in member_state["param_groups"]
            ]
            first += sum(len(group["params"]) for group in member_state["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        """Raises: ValueError, if there are not as many groups, or if a member refuses its part."""
        stored_groups = iter(stored["param_groups"])
        if len(stored["param_groups"]) != len(self.param_groups):
            raise ValueError(f"expected {len(self.param_groups)} groups of parameters, got {len(stored['param_groups'])}")
        for member_number, member in enumerate(self.members):
            groups = [next(stored_groups) for _ in member.param_groups]
            prefix = f"{member_number}."
            texts = [name for name in stored["state"] if isinstance(name, str) and name.startswith(prefix)]
            of_whole = {name.removeprefix(prefix): stored["state"][name] for name in texts}
            numbers = dict(zip(chain.from_iterable(group["params"] for group in groups), count(), strict=False))
            member.load_state_dict(
                {
                    "state": {numbers[number]: value for number, value in stored["state"].items() if number in numbers}
                    | of_whole,
                    "param_groups": [{**group, "params": [numbers[number] for number in group["params"]]} for group in groups],
                }
            )


AnyOptimizer = torch.optim.Optimizer | SeveralOptimizers


def members_of(optimizer: AnyOptimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that it consists of: it alone, unless it is several."""
    return optimizer.members if isinstance(optimizer, SeveralOptimizers) else [optimizer]


def name_of(optimizer: AnyOptimizer) -> str:
    """The names of the classes, as in 'Muon and AdamW'."""
    return " and ".join(type(member).__name__ for member in members_of(optimizer))


def has_modes(optimizer: object) -> bool:
    """Whether an optimizer, or one of several, has `train()` and `eval()`."""
    if isinstance(optimizer, SeveralOptimizers):
        return any(map(has_modes, optimizer.members))
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
