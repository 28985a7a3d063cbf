"""What becomes of an optimizer's stored state: its parameters are found by their names, and options are those of the config.

torch's `load_state_dict` numbers parameters by their place in the groups, and takes the stored groups with all of their options.
So a parameter that has moved to another group would get the state of another one, and a changed option would have no effect.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hvdtrain.errors import ConfigError, first_few
from hvdtrain.learner.optimizer import changed_options, option_texts
from hvdtrain.learner.torch.assembly import DividedOptimizer, Optimizer
from hvdtrain.learner.torch.optimizer import IMPLEMENTATIONS
from hvdtrain.learner.torch.several_optimizers import AnyOptimizer, SeveralOptimizers, members_of

NOT_OPTIONS = ("params", "param_names", "lr", "initial_lr")
"""Entries of groups that are no options: the learning rate is set at every update."""


ADDED = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
"""Options of torch's classes that need an entry in the state of each parameter, which begins with zeros."""

CLASS = "class"
"""An entry among the options of a group, if the optimizer is one of several."""


class OptimizerOptions:
    """The options that the config gives to each group of an optimizer.

    Args:
        optimizer: before its first step, and before a state is loaded: some classes keep in the groups what changes in training.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._own_optimizer = optimizer.inner if isinstance(optimizer, DividedOptimizer) else optimizer
        is_one_of_several = isinstance(self._own_optimizer, SeveralOptimizers)
        members = [member for member in members_of(self._own_optimizer) for _ in member.param_groups]
        self._classes = [type(member).__name__ if is_one_of_several else None for member in members]  # by group
        self._of_groups = [
            {name: value for name, value in group.items() if name not in NOT_OPTIONS} for group in optimizer.param_groups
        ]

    def texts(self) -> list[dict[str, str]]:
        """For a checkpoint: by group and name, each option as text."""
        texts = [option_texts(options) for options in self._of_groups]
        named = zip(texts, self._classes, strict=True)
        return [text if kind is None else text | {CLASS: kind} for text, kind in named]

    def load(
        self,
        stored: dict[str, Any],
        before: Sequence[Sequence[Mapping[str, str]]],
        is_of_class: bool,
        names_by_group: Sequence[Sequence[str]],
    ) -> list[str]:
        """Load a state whose parameters are numbered as in the optimizer's groups.

        An option takes effect as the config has it if the config had another value when the state was stored. Otherwise what the
        optimizer made of it holds.

        Args:
            stored: as `regroup` returns it.
            before: by group and parameter, the texts of the options that it had.
            is_of_class: whether it is known to be the state of an optimizer of this class.
            names_by_group: the names of the parameters in each group.

        Returns:
            Lines about options that changed.

        Raises:
            KeyError, ValueError: it is the state of another optimizer.
        """
        for kind, of_each, names in zip(self._classes, before, names_by_group, strict=True):
            moved = {name: was[CLASS] for name, was in zip(names, of_each, strict=True) if was.get(CLASS, kind) != kind}
            if kind is not None and moved:
                raise ValueError(
                    f"it has that of {', '.join(dict.fromkeys(moved.values()))} instead of {kind} for {first_few(list(moved), 3)}"
                )
        groups = []
        for group, options in zip(stored["param_groups"], self._of_groups, strict=True):
            implementation = {name: value for name, value in options.items() if name in IMPLEMENTATIONS or is_of_class}
            options_now = implementation | group
            groups.append(options_now | {name: options[name] for name in IMPLEMENTATIONS & options.keys()})
        self._optimizer.load_state_dict(_steps_on_cpu({**stored, "param_groups": groups}, self._optimizer))
        # load_state_dict takes groups as they are, those of another class included.
        loaded = self._optimizer.param_groups
        lacking = [name for options, group in zip(self._of_groups, loaded, strict=True) for name in options if name not in group]
        if lacking:
            raise ValueError(f"it has no {', '.join(dict.fromkeys(lacking))}")
        lines: dict[str, list[str]] = {}
        for group, options, of_each, names in zip(loaded, self._of_groups, before, names_by_group, strict=True):
            now = option_texts(options)
            changed = changed_options(of_each[0], now) if of_each else {}
            group.update({name: options[name] for name in changed})
            self._add_state(group, [entry for name, entry in ADDED.items() if name in changed and options[name]])
            for name, was in zip(names, of_each, strict=True):
                for option, line in changed_options(was, now).items():
                    if option not in IMPLEMENTATIONS:
                        lines.setdefault(line, []).append(name)
        count = sum(map(len, names_by_group))
        return [line if len(names) == count else f"{line} (of {first_few(names, 3)})" for line, names in lines.items()]

    def _add_state(self, group: Mapping[str, Any], entries: Sequence[str]) -> None:
        """Add what an option of torch's classes that is new needs of each parameter, as it begins; SGD adds it by itself."""
        for member in members_of(self._own_optimizer):
            is_its_group = any(group is member_group for member_group in member.param_groups)
            if not is_its_group or not type(member).__module__.startswith("torch.") or isinstance(member, torch.optim.SGD):
                continue
            for parameter in group["params"]:
                of_one = member.state.get(parameter, {})
                for entry in entries if of_one else ():
                    of_one.setdefault(entry, torch.zeros_like(parameter))


def regroup(
    stored: dict[str, Any], stored_names: Sequence[str], names_by_group: Sequence[Sequence[str]]
) -> tuple[dict[str, Any], list[list[int]]]:
    """An optimizer's state, such as RETURNN's, with its parameters in the groups and in the order of this model's optimizer.

    Args:
        stored_names: the names of the parameters by their numbers. Those that the model does not train are left out.
        names_by_group: the names of the parameters in each group of this model's optimizer.

    Returns:
        The state, in which each group has the entries of the stored group that its first parameter was in; and by group and
        parameter, the number of the stored group.

    Raises:
        ValueError: it is not the state of all of these parameters.
    """
    stored_groups = enumerate(stored["param_groups"])
    group_of = {stored_names[parameter]: number for number, group in stored_groups for parameter in group["params"]}
    if missing := [name for names in names_by_group for name in names if name not in group_of]:
        raise ValueError(f"expected that of all trained parameters, got none for {', '.join(missing)}")
    numbers = {name: number for number, name in enumerate(name for names in names_by_group for name in names)}
    last = len(stored["param_groups"]) - 1
    sources = [[group_of[name] for name in names] for names in names_by_group]
    groups = [
        {**stored["param_groups"][source[0] if source else min(number, last)], "params": [numbers[name] for name in names]}
        for number, (source, names) in enumerate(zip(sources, names_by_group, strict=True))
    ]
    state: dict[int | str, Any] = {
        parameter: value for parameter, value in stored["state"].items() if isinstance(parameter, str)
    }  # of the optimizer as a whole
    of_each = [(stored_names[parameter], value) for parameter, value in stored["state"].items() if not isinstance(parameter, str)]
    state |= {numbers[name]: value for name, value in of_each if name in numbers}
    return {**stored, "state": state, "param_groups": groups}, sources


def missing_states(stored: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The line about parameters without a state, where others have one; None: there are none.

    For a file that does not say which of them had one when it was saved.

    Args:
        names: those of the parameters, by their numbers.
    """
    of_each = [(number, value) for number, value in stored["state"].items() if isinstance(value, dict)]
    having = {number for number, of_one in of_each if any(value is not None for value in of_one.values())}
    without = [name for number, name in enumerate(names) if number not in having]
    if not having or not without:
        return None
    return (
        f"the optimizer's state begins anew for {first_few(without, 3)}: the file has none, as for a parameter that has had no "
        "gradient yet"
    )


def check_state_shapes(stored: Mapping[str, Any], names: Sequence[str], parameters: Mapping[str, torch.Tensor]) -> None:
    """Whether a state fits, of an optimizer of PyTorch's that keeps single numbers, or as many as the parameter has.

    Args:
        names: those of the parameters, by their numbers.
        parameters: by name.

    Raises:
        ValueError: the optimizer's next step would fail.
    """
    for number, name in enumerate(names):
        parameter = parameters.get(name)
        for entry, value in stored["state"].get(number, {}).items():
            if parameter is not None and isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
                raise ValueError(f"{entry} of {name} has the shape {tuple(value.shape)} instead of {tuple(parameter.shape)}")


def _steps_on_cpu(stored: dict[str, Any], optimizer: object) -> dict[str, Any]:
    """The state of an optimizer of PyTorch with `step` on the CPU, where they keep it; where it belongs to the device, as with
    fused=True, load_state_dict copies it there. On the device, they would read it from there in every update, for each
    parameter."""
    if not isinstance(optimizer, (torch.optim.Optimizer, SeveralOptimizers, DividedOptimizer)):
        return stored
    state = {number: dict(value) if isinstance(value, dict) else value for number, value in stored["state"].items()}
    for of_one in state.values():
        if isinstance(of_one, dict) and isinstance(of_one.get("step"), torch.Tensor):
            of_one["step"] = of_one["step"].cpu()
    return {**stored, "state": state}


PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
CONTAINERS = (dict, OrderedDict, list, tuple, set)
"""The types of values, besides tensors, that PyTorch reads from a file without running code in it."""


def check_plain(optimizer: AnyOptimizer) -> None:
    """Check after the first update that a checkpoint with an optimizer's state can be read again. Raises: ConfigError."""
    for member in members_of(optimizer):
        if is_of_torch(member) or not hasattr(member, "state_dict"):
            continue
        for path, value in _others(member.state_dict(), ""):
            raise ConfigError.of(
                "unsupported",
                "optimizer: expected one whose state consists of tensors and plain values, as a checkpoint with others cannot be "
                f"loaded, got {type(member).__name__}, whose {path} has a {type(value).__module__}.{type(value).__qualname__}",
            )


def is_of_torch(optimizer: object) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _others(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and type(value) in CONTAINERS:
        for name, member in value.items():
            yield from _others(member, f"{path}.{name}" if path else str(name))
    elif type(value) in CONTAINERS:
        for number, member in enumerate(value):
            yield from _others(member, f"{path}.{number}")
    elif type(value) not in PLAIN and not isinstance(value, torch.Tensor):
        yield path, value
