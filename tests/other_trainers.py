"""What shows that a model of another trainer trains as there: the same weights, also when it is stopped and resumed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdtrain
from hvdtrain.runtime.interrupt import Stopped

State = dict[str, torch.Tensor]


class StopAfter:
    """Stops a training in the middle of an epoch."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, training: Any) -> None:
        if training.step == self.step:
            training.stop("test")


def state_of(model: torch.nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def train(keys: Mapping[str, Any], model: Path, **more: Any) -> State:
    """The model at the end of a training in this process."""
    return state_of(hvdtrain.train({**keys, "model": str(model), "num_threads": 1, **more}).model)


def difference(found: State, wanted: State, start: State) -> float:
    """The norm of the difference to the wanted weights, as a share of that of their change."""
    assert found.keys() == wanted.keys()

    def norm(one: State, other: State) -> float:
        return sum(float(((one[name] - other[name]).double() ** 2).sum()) for name in one if one[name].is_floating_point()) ** 0.5

    return norm(found, wanted) / norm(wanted, start)


def check_resume(keys: Callable[[], Mapping[str, Any]], folder: Path, step: int, wanted: State) -> None:
    """A training that is stopped after a step and resumed ends with the wanted weights, to the last bit.

    Args:
        keys: called for each start, as a config is read for each.
    """
    stopping = {**keys(), "model": str(folder / "resumed"), "num_threads": 1}
    with pytest.raises(Stopped):
        hvdtrain.train({**stopping, "callbacks": [*as_list(stopping.get("callbacks")), StopAfter(step)]})
    found = train(keys(), folder / "resumed")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
