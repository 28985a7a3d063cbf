"""An optimizer whose state is divided among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from hvdtrain.comm.base import Communicator, all_reduce
from hvdtrain.learner.frameworks import Extend
from hvdtrain.learner.torch.assembly import Assembly, DividedOptimizer
from hvdtrain.learner.torch.several_optimizers import AnyOptimizer, members_of
from hvdtrain.plugins.sharded.keys import ShardingKeys
from hvdtrain.plugins.sharded.shares import check_shares
from hvdtrain.settings import Settings


def sharded_over(settings: Settings, comm: Communicator) -> Extend | None:
    """Of the table `learner_extensions`: None, unless the config divides the optimizer and there are several ranks."""
    is_sharded = settings.of(ShardingKeys).sharded and comm.size > 1
    return partial(shard, comm) if is_sharded else None


def shard(comm: Communicator, assembly: Assembly) -> None:
    """Divide the state of the optimizer among ranks."""

    def divide(optimizer: AnyOptimizer) -> ShardedOptimizer:
        check_shares(optimizer)
        return ShardedOptimizer(optimizer, comm)

    assembly.divide = divide


class ShardedOptimizer(DividedOptimizer):
    """The config's optimizer with this rank's share of the parameters.

    A checkpoint depends neither on sharding nor on the number of ranks.

    Args:
        optimizer: with all parameters, before its first step. The parameters of other ranks are removed from its groups.
    """

    def __init__(self, optimizer: AnyOptimizer, comm: Communicator) -> None:
        self.inner = optimizer
        self._comm = comm
        self.whole_groups = [list(group["params"]) for group in optimizer.param_groups]
        parameters = [parameter for group in self.whole_groups for parameter in group]
        owners = _owners([parameter.numel() for parameter in parameters], comm.size)
        self._owner_of = {id(parameter): owner for parameter, owner in zip(parameters, owners, strict=True)}
        self._of_rank: list[list[torch.Tensor]] = [[] for _ in range(comm.size)]
        for parameter, owner in zip(parameters, owners, strict=True):
            self._of_rank[owner].append(parameter)
        share = {id(parameter) for parameter in self._of_rank[comm.rank]}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in share]
        for member in members_of(optimizer):
            for parameter in parameters:
                if id(parameter) not in share:
                    member.state.pop(parameter, None)  # some classes create it in the constructor
        self._is_own: torch.Tensor | None = None
        self._gathered: dict[str, Any] | None = None

    def owners(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        return [self._owner_of.get(id(parameter), 0) for parameter in parameters]

    def norms(self, parameters: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
        # From each gradient's owner. The parameters are always the same.
        norms_here = torch._foreach_norm([parameter.grad for parameter in parameters if parameter.grad is not None], order)
        remaining = iter(norms_here)
        zero = norms_here[0].new_zeros((), dtype=torch.float64)
        norms = torch.stack([zero if parameter.grad is None else next(remaining).double() for parameter in parameters])
        if self._is_own is None:  # created once, as creating it waits for the device
            owners = self.owners(parameters)
            self._is_own = torch.tensor([owner == self._comm.rank for owner in owners], device=norms.device)
        [all_norms] = all_reduce(self._comm, [norms.where(self._is_own, 0.0)], "sum", name="gradient_norms")
        present = [norm for norm, parameter in zip(all_norms.unbind(), parameters, strict=True) if parameter.grad is not None]
        return [norm.to(own_norm.dtype) for norm, own_norm in zip(present, norms_here, strict=True)]

    def step(self) -> None:
        self.inner.step()
        self.exchange()

    def exchange(self) -> None:
        with torch.no_grad():
            for kind in dict.fromkeys(parameter.dtype for group in self.whole_groups for parameter in group):
                self._exchange_shares([[parameter for parameter in share if parameter.dtype == kind] for share in self._of_rank])

    def _exchange_shares(self, shares: list[list[torch.Tensor]]) -> None:
        """Collective. Send every rank's share of the parameters to all ranks."""
        flat = [parameter.reshape(-1) for parameter in shares[self._comm.rank]]
        any_parameter = next(parameter for share in shares for parameter in share)
        mine = torch.cat(flat) if flat else any_parameter.new_empty(0)
        lengths = [sum(parameter.numel() for parameter in share) for share in shares]
        [all_values] = self._comm.gather_rows([mine], name="sharded_parameters", lengths=lengths)
        parameters = [parameter for share in shares for parameter in share]
        for parameter, values in zip(parameters, all_values.split([parameter.numel() for parameter in parameters]), strict=True):
            parameter.copy_(values.view(parameter.shape))

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.whole_groups:
            for parameter in group:
                parameter.grad = None

    def gather(self) -> None:
        """Collective. Collect the whole state in rank 0's main memory, one rank's share at a time."""
        whole: dict[int | str, Any] = {}
        numbers = self._numbers()
        for rank in range(self._comm.size):
            mine: dict[int | str, Any] | None = None
            if rank == self._comm.rank:
                states: list[tuple[Any, Any]] = [item for member in members_of(self.inner) for item in member.state.items()]
                mine = {numbers.get(id(parameter), parameter): _on_cpu(state) for parameter, state in states}
            whole |= self._comm.send_to_first(mine, rank, name="sharded_state") or {}
        if self._comm.rank == 0:
            self._gathered = {
                "state": dict(sorted(whole.items(), key=lambda item: (isinstance(item[0], str), item[0]))),
                "param_groups": self._all_groups(),
            }

    @property
    def is_gathered(self) -> bool:
        return self._gathered is not None

    def state_dict(self) -> dict[str, Any]:
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            raise RuntimeError("ShardedOptimizer.state_dict: expected a call of gather() on all ranks before, got none")
        return gathered

    def load_state_dict(self, whole: dict[str, Any]) -> None:
        lengths = [len(group["params"]) for group in whole["param_groups"]]
        if lengths != [len(group) for group in self.whole_groups]:
            raise ValueError(f"expected groups of {[len(group) for group in self.whole_groups]} parameters, got {lengths}")
        numbers = self._numbers()
        share = [numbers[id(parameter)] for group in self.inner.param_groups for parameter in group["params"]]
        places = iter(range(len(share)))
        groups = [
            {**stored, "params": [next(places) for _ in group["params"]]}
            for stored, group in zip(whole["param_groups"], self.inner.param_groups, strict=True)
        ]
        state: dict[int | str, Any] = {
            place: whole["state"][number] for place, number in enumerate(share) if number in whole["state"]
        }
        state |= {name: value for name, value in whole["state"].items() if isinstance(name, str)}  # of the optimizer as a whole
        self.inner.load_state_dict({"state": state, "param_groups": groups})

    def _numbers(self) -> dict[int, int]:
        """The number of each parameter in an unsharded optimizer's state, by the parameter's id."""
        parameters = [parameter for group in self.whole_groups for parameter in group]
        return {id(parameter): number for number, parameter in enumerate(parameters)}

    def _all_groups(self) -> list[dict[str, Any]]:
        places = iter(range(sum(len(group) for group in self.whole_groups)))
        return [
            {**{name: value for name, value in group.items() if name != "params"}, "params": [next(places) for _ in whole]}
            for group, whole in zip(self.inner.param_groups, self.whole_groups, strict=True)
        ]


def _owners(sizes: list[int], ranks: int) -> list[int]:
    """The rank that owns each parameter: from the largest to the smallest, each goes to the rank with the least so far.

    >>> _owners([5, 100, 40, 70], 2)
    [0, 0, 1, 1]
    """
    load = [0] * ranks
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owners[number] = min(range(ranks), key=lambda rank: load[rank])
        load[owners[number]] += sizes[number]
    return owners


def _on_cpu(state: Any) -> Any:
    if not isinstance(state, dict):
        return state.cpu() if isinstance(state, torch.Tensor) else state
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
