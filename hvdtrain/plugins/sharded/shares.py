"""Whether an optimizer can be divided among ranks: the update of a parameter must not depend on those of other ranks.

Classes of other packages may compute a norm, a mean or a step size over all their parameters. Each rank would then compute
another one, without an error. So a few values of the model's parameters are trained with all of them and with a part of them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch

from hvdtrain.data.randomness import mix_seed, own_numbers
from hvdtrain.errors import ConfigError
from hvdtrain.learner.torch.device import seed_all
from hvdtrain.learner.torch.optimizer_state import is_of_torch
from hvdtrain.learner.torch.several_optimizers import AnyOptimizer, has_modes, members_of
from hvdtrain.learner.torch.tensors import preserve_state

UPDATES = 20
TRIALS = ((0.01, (1.0, 30.0, 0.1)), (1.0, (1.0,)))
"""Learning rates, each with the sizes of gradients: above and below the bounds of clipping; and for classes that estimate a rate,
such as Prodigy, which grows only if steps of size 1 continue in the same direction."""

LENGTH = 4
"""The number of values that are kept along each axis of a parameter."""

PARAMETERS = 2
"""So many parameters with the same number of axes are tried in each group: one that stays and one that does not."""

TOLERANCE = 1e-3
"""How much the sums of updates may differ, relative to the largest one."""


def check_shares(optimizer: AnyOptimizer) -> None:
    """Raises: ConfigError, if an optimizer updates some parameters in another way without the others, or not at all; or if it
    saves more than the state and the groups, which are what the ranks gather.

    Those of PyTorch do not, and are not tried.
    """
    for member in members_of(optimizer):
        if not is_of_torch(member) and (reason := _extra_state(member) or _difference(member)) is not None:
            raise ConfigError.of(
                "unsupported",
                "torch_distributed.sharded: expected an optimizer whose update of a parameter does not depend on other "
                f"parameters, as each rank has some of them, got {type(member).__name__}, which {reason}",
            )


def _extra_state(optimizer: torch.optim.Optimizer) -> str | None:
    others = optimizer.state_dict().keys() - {"state", "param_groups"}
    return f"also saves {', '.join(sorted(map(str, others)))} of all of them" if others else None


def _difference(optimizer: torch.optim.Optimizer) -> str | None:
    """What an optimizer does with a part of its parameters that it does not with all; None: nothing, or it cannot be tried."""
    parameters = _choose(optimizer)
    before = [_corner(parameter).detach() for parameter in parameters]
    last = len(parameters) - 1  # which often gets no gradient
    with own_numbers(0), preserve_state():
        for trial in TRIALS:
            try:
                whole = _train_copies(optimizer, parameters, range(len(parameters)), *trial)
            except Exception:  # the first update of the training will raise it, too
                continue
            for numbers in (range(0, last + 1, 2), range(1, last + 1, 2), range(last, last + 1)):
                try:
                    updated = _train_copies(optimizer, parameters, numbers, *trial)
                except Exception as error:
                    return f"fails with a part of them: {type(error).__name__}: {error}"
                if any(_differ(whole[number] - before[number], updated[number] - before[number]) for number in numbers):
                    return "updates some of them in another way without the others"
    return None


def _choose(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    chosen: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        counts: dict[int, int] = defaultdict(int)
        for parameter in group["params"]:
            counts[parameter.dim()] += 1
            if counts[parameter.dim()] <= PARAMETERS:
                chosen.append(parameter)
    return chosen


def _corner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[tuple(slice(LENGTH) for _ in tensor.shape)]


def _train_copies(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    numbers: Collection[int],
    rate: float,
    sizes: Sequence[float],
) -> list[torch.Tensor]:
    """The values of small copies of parameters after some updates, of which an optimizer has only a part."""
    small = [torch.nn.Parameter(_corner(parameter).detach().clone()) for parameter in parameters]
    tried = _small_copy(optimizer, parameters, small, numbers)
    if has_modes(tried):
        tried.train()  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(parameter.shape, generator=generator) for parameter in small]
    for update in range(UPDATES):
        for number, parameter in enumerate(small):
            gradient = directions[number] + 0.3 * torch.randn(parameter.shape, generator=generator)
            is_missing = update % 2 and number == len(small) - 1  # as if it was not used in this step
            parameter.grad = None if is_missing else (gradient * sizes[(update + number) % len(sizes)]).to(parameter)
        for group in tried.param_groups:
            group["lr"] = rate
        seed_all(small[0].device, mix_seed(update))
        tried.step()
    return [parameter.detach() for parameter in small]


def _small_copy(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    small: Sequence[torch.nn.Parameter],
    numbers: Collection[int],
) -> torch.optim.Optimizer:
    """A copy of an optimizer that has some of the small copies of parameters, as `ShardedOptimizer` leaves it a rank's."""
    copied = object.__new__(type(optimizer))
    copies: dict[int, Any] = {id(optimizer): copied}  # what stands for each object in the copy: no large tensor is copied
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        copies[id(parameter)] = torch.nn.Parameter(_corner(parameter).detach().clone())
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                copies[id(value)] = _corner(value).detach().clone()
    copies |= {id(parameter): replacement for parameter, replacement in zip(parameters, small, strict=True)}
    vars(copied).update(copy.deepcopy(vars(optimizer), copies))
    ids = {id(small[number]) for number in numbers}
    for group in copied.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in ids]
    for tensor in [tensor for tensor in copied.state if isinstance(tensor, torch.Tensor) and id(tensor) not in ids]:
        del copied.state[tensor]
    return copied


def _differ(first: torch.Tensor, second: torch.Tensor) -> bool:
    largest = float(first.abs().nan_to_num().max()) if first.numel() else 0.0
    return not torch.allclose(first, second, rtol=0.0, atol=TOLERANCE * largest, equal_nan=True)
