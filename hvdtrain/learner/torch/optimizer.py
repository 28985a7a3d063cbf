"""The config's optimizer, its parameter groups, and its state divided among the ranks."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvdtrain.comm.base import Communicator, all_reduce
from hvdtrain.errors import ConfigError, Problem, problem
from hvdtrain.learner.optimizer import (
    BLACKLIST,
    INCLUDE,
    DecayRule,
    class_names,
    class_of,
    frontend_class_names,
    option_problems,
    take_decay_rule,
    wrapped_rf_module,
)  # fmt: skip
from hvdtrain.learner.torch.tensors import trained_of


def make_optimizer(spec: dict[str, Any] | str | Any, model: torch.nn.Module, fused: bool = False) -> torch.optim.Optimizer:
    """An optimizer from `{"class": "adamw", "weight_decay": 0.01, ...}`, a name, or a function of the parameters.

    A third-party class can be given as a class or as `"package.module.Class"`.

    The learning rate is set at every update; `epsilon` can be given for `eps`.

    Args:
        fused: prefer the fused implementation, which can skip an update itself, if the class has one and the options choose no
            other.

    Raises:
        ConfigError: there is no such optimizer, or it has no such options.
    """
    if callable(spec) and not isinstance(spec, type):
        return _check_optimizer(spec(trained_of(model)), model)
    options: dict[str, Any] = dict(spec) if isinstance(spec, dict) else {"class": spec}
    wanted = options.pop("class")
    known = {
        name.lower(): member
        for name, member in vars(torch.optim).items()
        if isinstance(member, type) and issubclass(member, torch.optim.Optimizer) and member is not torch.optim.Optimizer
    }
    made = import_class(wanted) if isinstance(wanted, str) and "." in wanted else class_of(wanted, known, "optimizer.class")
    if unfit := _unsupported_reason(made):
        raise ConfigError.of("unsupported", f"optimizer.class: {unfit}")
    if "epsilon" in options:
        options["eps"] = options.pop("epsilon")
    groups = make_groups(model, made, options)
    problems = option_problems(made, options, "optimizer.")
    if problems:
        raise ConfigError(problems)
    is_real = all(parameter.is_floating_point() for parameter in trained_of(model))
    if fused and is_real and issubclass(made, FUSED) and not IMPLEMENTATIONS & options.keys():
        options["fused"] = True
    try:
        # It is set at every update, but some third-party classes assert that it is positive.
        rate = 0.0 if made.__module__.startswith("torch.") else 1.0
        return made(groups, lr=rate, **options)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise ConfigError.of("unknown-key", f"optimizer: expected options of {made.__name__}, got {options}: {error}") from None


def _unsupported_reason(made: type) -> str | None:
    """Why an optimizer class cannot be used; None: it can."""
    if issubclass(made, torch.optim.SparseAdam):
        return "expected an optimizer for dense gradients, which are what ranks reduce, got SparseAdam (adam, adamw, ...)"
    given = (
        inspect.signature(made.step).parameters.values() if hasattr(made, "step") else ()
    )  # without `self`, also of decorated ones
    needed = [
        one.name for one in given if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if needed[1:]:
        return (
            f"expected an optimizer that takes gradients as they are, got {made.__name__}, whose step() needs a {needed[1]} to "
            "compute the loss again"
        )
    return None


def _check_optimizer(made: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Check the result of the config's function. Raises: ConfigError, unless it is an optimizer with all trained parameters."""
    groups = getattr(made, "param_groups", None)
    if not isinstance(groups, list) or not callable(getattr(made, "step", None)):
        raise ConfigError.of(
            "wrong-result", f"optimizer: expected a function that returns an optimizer of PyTorch, got {_describe_type(made)}"
        )
    problems = problem("unsupported", f"optimizer: {unfit}") if (unfit := _unsupported_reason(type(made))) else []
    problems += _parameter_problems("optimizer", groups, model)
    if problems:
        raise ConfigError(problems)
    return made  # type: ignore[no-any-return]


def _parameter_problems(where: str, groups: Sequence[Mapping[str, Any]], model: torch.nn.Module) -> list[Problem]:
    """Problems with the parameters in groups. A parameter in none of them would silently keep its initial values."""
    times = Counter(id(parameter) for group in groups for parameter in group["params"])
    names = {id(parameter) for parameter in model.parameters()}
    missing = [name for name, param in model.named_parameters() if param.requires_grad and not times[id(param)]]
    twice = [name for name, param in model.named_parameters() if times[id(param)] > 1]
    problems = []
    if missing:
        problems += problem(
            "wrong-result",
            f"{where}: expected each trained parameter of the model in its groups, got groups without {', '.join(missing)} "
            "(requires_grad_(False) leaves a parameter untrained)",
        )
    if twice:
        problems += problem(
            "wrong-result",
            f"{where}: expected each trained parameter of the model once in its groups, got {', '.join(twice)} twice",
        )
    if times.keys() - names:
        problems += problem(
            "wrong-result",
            f"{where}: expected the model's parameters in its groups, got a tensor that is not a parameter of the model",
        )
    return problems


def import_class(name: str) -> Any:
    """Import the class `package.module.Class`. Raises: ConfigError, if that fails."""
    module, _, last = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), last)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError.of(
            "cannot-import", f"optimizer.class: expected a name that can be imported, got {name!r}: {error}"
        ) from error
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
        raise ConfigError.of("wrong-type", f"optimizer.class: expected a torch.optim.Optimizer, got {found!r} as {name!r}")
    return found


FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Classes with a fused GPU implementation in all supported versions of PyTorch."""

IMPLEMENTATIONS = {"fused", "foreach", "capturable", "differentiable"}
"""Options of torch.optim's classes that select or rule out an implementation."""

DEFAULT_RULE = DecayRule((torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.Embedding))
"""The parameters of these modules do not decay, nor do biases."""

CUSTOM = "param_groups_custom"
MULTIPLIER = "learning_rate_multiplier"


def make_groups(model: torch.nn.Module, made: type, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Remove the options about parameter groups, and return the groups to create an optimizer with.

    Args:
        made: the optimizer's class.
        options: the config's.

    Raises:
        ConfigError: with all problems.
    """
    custom = options.pop(CUSTOM, None)
    if custom is not None:
        both = [name for name in (BLACKLIST, INCLUDE) if options.pop(name, None) is not None]
        if both:
            raise ConfigError.of(
                "conflict", f"optimizer.{both[0]}: expected it without {CUSTOM}, which makes all groups, got both"
            )
        if not callable(custom):
            raise ConfigError.of(
                "wrong-type", f"optimizer.{CUSTOM}: expected a function (*, model, optimizer_class, **_), got {custom!r}"
            )
        groups = custom(model=model, rf_model=wrapped_rf_module(model), optimizer_class=made, optimizer_opts=dict(options))
        return _check_groups(groups, model, made)
    asked = any(options.get(name) is not None for name in (BLACKLIST, INCLUDE))
    modules = [one for module in model.modules() for one in (module, wrapped_rf_module(module)) if one is not None]
    known = {*vars(torch.nn), *frontend_class_names(), *(name for module in modules for name in class_names(module))}
    rule = take_decay_rule(options, DEFAULT_RULE, known)
    trained = trained_of(model)
    if not options.get("weight_decay"):
        if asked:
            raise ConfigError.of(
                "missing", f"optimizer.weight_decay: expected a positive number with {BLACKLIST} or {INCLUDE}, got none"
            )
        return [{"params": trained}]
    decayed: dict[int, bool] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.requires_grad and id(parameter) not in decayed:  # the first name of a shared parameter counts
                decayed[id(parameter)] = rule.decays(module, name, parameter)
    groups = [
        {"params": [parameter for parameter in trained if decayed[id(parameter)]]},
        {"params": [parameter for parameter in trained if not decayed[id(parameter)]], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def take_multipliers(groups: list[dict[str, Any]]) -> list[float]:
    """Remove the learning rate multiplier from each group, and return them: an optimizer that loads a state takes over the
    checkpoint's groups, but the config's multipliers have to apply."""
    return [group.pop(MULTIPLIER, 1.0) for group in groups]


def _check_groups(groups: Any, model: torch.nn.Module, made: type) -> list[dict[str, Any]]:
    """Check the groups from the config's function. Raises: ConfigError, unless they have each trained parameter exactly once."""
    made_groups = list(groups) if isinstance(groups, (list, tuple)) else []
    if not made_groups or not all(isinstance(group, dict) and "params" in group for group in made_groups):
        raise ConfigError.of(
            "wrong-result",
            f"optimizer.{CUSTOM}: expected it to return a list of dicts with the entry 'params', got {_describe_type(groups)}",
        )
    problems = []
    for number, group in enumerate(made_groups):
        several = [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
        # The entries of named_parameters() are pairs (name, parameter).
        group["params"] = [entry[1] if isinstance(entry, tuple) else entry for entry in several]
        where = f"optimizer.{CUSTOM}[{number}]."
        others = {name: value for name, value in group.items() if name != "params"}
        problems += option_problems(made, others, where, [MULTIPLIER])
        factor = group.get(MULTIPLIER, 1.0)
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor < 0:
            problems += problem("out-of-range", f"{where}{MULTIPLIER}: expected zero or a positive number, got {factor!r}")
    problems += _parameter_problems(f"optimizer.{CUSTOM}", made_groups, model)
    if problems:
        raise ConfigError(problems)
    return made_groups


def _describe_type(value: Any) -> str:
    inside = f" of {type(value[0]).__name__}" if isinstance(value, (list, tuple)) and value else ""
    return f"a {type(value).__name__}{inside}"


def names_by_group(model: torch.nn.Module, groups: Sequence[Sequence[torch.Tensor]]) -> list[list[str]]:
    """The names of the parameters in each group, in the order in which an optimizer's state numbers them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names.get(id(parameter), "") for parameter in group] for group in groups]


class ShardedOptimizer:
    """The config's optimizer with this rank's share of the parameters.

    A gradient is reduced only to the rank that owns its parameter; on other ranks its values are undefined. `norms` computes
    norms over all gradients.

    It saves and loads the state of all parameters like an unsharded optimizer: a checkpoint depends neither on sharding nor on
    the number of ranks.

    Args:
        optimizer: with all parameters, before its first step. The parameters of other ranks are removed from its groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, comm: Communicator) -> None:
        self._optimizer = optimizer
        self._comm = comm
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        parameters = [parameter for group in self._groups for parameter in group]
        owners = _owners([parameter.numel() for parameter in parameters], comm.size)
        self._owner_of = {id(parameter): owner for parameter, owner in zip(parameters, owners, strict=True)}
        self._of_rank: list[list[torch.Tensor]] = [[] for _ in range(comm.size)]
        for parameter, owner in zip(parameters, owners, strict=True):
            self._of_rank[owner].append(parameter)
        own = {id(parameter) for parameter in self._of_rank[comm.rank]}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]
        for parameter in parameters:
            if id(parameter) not in own:
                optimizer.state.pop(parameter, None)  # some classes create it in the constructor
        self._is_own: torch.Tensor | None = None
        self._gathered: dict[str, Any] | None = None

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The config's optimizer, with this rank's share."""
        return self._optimizer

    @property
    def name(self) -> str:
        """The name of the optimizer's class."""
        return type(self._optimizer).__name__

    @property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's hyperparameters."""
        return self._optimizer.defaults

    @property
    def whole_groups(self) -> list[list[torch.Tensor]]:
        """The parameters of all ranks, by group."""
        return self._groups

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with this rank's parameters."""
        return self._optimizer.param_groups

    def owners(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """For each parameter, the rank that keeps its state, the only one to need its reduced gradient. Rank 0 for parameters
        that are not in the optimizer."""
        return [self._owner_of.get(id(parameter), 0) for parameter in parameters]

    def norms(self, parameters: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
        """Collective. The norm of each parameter's gradient, from its owner: the same as if all ranks had all gradients.

        Args:
            parameters: always the same. Returns norms for those that have a gradient, which are the same on all ranks.
        """
        own = torch._foreach_norm([one.grad for one in parameters if one.grad is not None], order)
        remaining, zero = iter(own), own[0].new_zeros((), dtype=torch.float64)
        norms = torch.stack([zero if one.grad is None else next(remaining).double() for one in parameters])
        if self._is_own is None:  # created once, as creating it waits for the device
            owners = self.owners(parameters)
            self._is_own = torch.tensor([owner == self._comm.rank for owner in owners], device=norms.device)
        [all_norms] = all_reduce(self._comm, [norms.where(self._is_own, 0.0)], "sum", name="gradient_norms")
        present = [norm for norm, one in zip(all_norms.unbind(), parameters, strict=True) if one.grad is not None]
        return [norm.to(own_norm.dtype) for norm, own_norm in zip(present, own, strict=True)]

    def step(self) -> None:
        """Collective. Update this rank's parameters and send them to the others."""
        self._optimizer.step()
        with torch.no_grad():
            for kind in dict.fromkeys(parameter.dtype for group in self._groups for parameter in group):
                self._exchange([[one for one in share if one.dtype == kind] for share in self._of_rank])

    def _exchange(self, shares: list[list[torch.Tensor]]) -> None:
        """Collective. Send every rank's share of the parameters to all ranks."""
        flat = [parameter.reshape(-1) for parameter in shares[self._comm.rank]]
        any_parameter = next(parameter for share in shares for parameter in share)
        mine = torch.cat(flat) if flat else any_parameter.new_empty(0)
        lengths = [sum(parameter.numel() for parameter in share) for share in shares]
        [all_values] = self._comm.gather_rows([mine], name="sharded_parameters", lengths=lengths)
        parameters = [parameter for share in shares for parameter in share]
        for parameter, values in zip(parameters, all_values.split([one.numel() for one in parameters]), strict=True):
            parameter.copy_(values.view(parameter.shape))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, including those of other ranks."""
        for group in self._groups:
            for parameter in group:
                parameter.grad = None

    def gather(self) -> None:
        """Collective. Collect the whole state in rank 0's main memory, one rank's share at a time."""
        whole: dict[int, Any] = {}
        numbers = self._numbers()
        for rank in range(self._comm.size):
            mine = None
            if rank == self._comm.rank:
                mine = {numbers[id(one)]: _on_cpu(state) for one, state in self._optimizer.state.items()}
            [share] = [sent for sent in self._comm.gather(mine, name="sharded_state") if sent is not None]
            if self._comm.rank == 0:
                whole |= share
        self._gathered = {"state": dict(sorted(whole.items())), "param_groups": self._all_groups()}

    def state_dict(self) -> dict[str, Any]:
        """The state that `gather` collected. Called by rank 0, once after each `gather`."""
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            raise RuntimeError("ShardedOptimizer.state_dict: expected a call of gather() on all ranks before, got none")
        return gathered

    def load_state_dict(self, whole: dict[str, Any]) -> None:
        """Load this rank's share of an unsharded optimizer's state. Raises: KeyError, ValueError, if it belongs to another
        optimizer."""
        lengths = [len(group["params"]) for group in whole["param_groups"]]
        if lengths != [len(group) for group in self._groups]:
            raise ValueError(f"expected groups of {[len(group) for group in self._groups]} parameters, got {lengths}")
        numbers = self._numbers()
        own = [numbers[id(parameter)] for group in self._optimizer.param_groups for parameter in group["params"]]
        places = iter(range(len(own)))
        groups = [
            {**stored, "params": [next(places) for _ in group["params"]]}
            for stored, group in zip(whole["param_groups"], self._optimizer.param_groups, strict=True)
        ]
        state = {place: whole["state"][number] for place, number in enumerate(own) if number in whole["state"]}
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _numbers(self) -> dict[int, int]:
        """The number of each parameter in an unsharded optimizer's state, by the parameter's id."""
        parameters = [parameter for group in self._groups for parameter in group]
        return {id(parameter): number for number, parameter in enumerate(parameters)}

    def _all_groups(self) -> list[dict[str, Any]]:
        places = iter(range(sum(len(group) for group in self._groups)))
        return [
            {**{name: value for name, value in group.items() if name != "params"}, "params": [next(places) for _ in whole]}
            for group, whole in zip(self._optimizer.param_groups, self._groups, strict=True)
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


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
