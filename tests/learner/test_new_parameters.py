"""Parameters that the config's code makes, replaces or unfreezes while it trains: the optimizer would never see them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import hvdtrain
from hvdtrain.errors import ConfigError


def train(folder: Path, model: nn.Module, **more: Any) -> Any:
    def train_step(*, model: nn.Module, extern_data: Mapping[str, Any], **_: Any) -> None:
        hvdtrain.get_run_ctx().mark_as_loss(model(extern_data["data"].raw_tensor).square().mean(-1), "loss")

    data = [numpy.full((4, 3), number, numpy.float32) for number in range(6)]
    keys = {"train": data, "max_seqs": 2, "num_epochs": 2, "learning_rate": 0.01, "num_threads": 1}
    return hvdtrain.train(
        keys | {"model": str(folder / "model"), "get_model": lambda **_: model, "train_step": train_step} | more
    )


class MakesALayer(nn.Linear):
    """As code does that learns the size of its input from the first batch."""

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(2, 2)
        return self.late(super().forward(frames))  # type: ignore[no-any-return]


def frozen_at_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    return model


def in_epoch_2(change: Callable[[Any], Any]) -> Callable[..., None]:
    def epoch_start(*, epoch: int, model: Any, **_: Any) -> None:
        if epoch == 2:
            change(model)

    return epoch_start


def replace(model: Any) -> None:
    model[1] = nn.Linear(2, 2)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "made": (lambda: MakesALayer(3, 2), None, "late.weight, late.bias"),
    "unfrozen": (frozen_at_first, in_epoch_2(lambda model: model.requires_grad_(True)), "0.weight, 0.bias"),
    "replaced": (lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), in_epoch_2(replace), "1.weight, 1.bias"),
}


@pytest.mark.parametrize("case", CASES)
def test_parameters_that_the_optimizer_does_not_have_are_an_error(case: str, tmp_path: Path) -> None:
    make, epoch_start, names = CASES[case]
    with pytest.raises(ConfigError, match=f"expected the parameters that are trained, got others since training began: {names} "):
        train(tmp_path, make(), **({} if epoch_start is None else {"epoch_start": epoch_start}))
    assert not list(tmp_path.glob("model.002*"))


def test_parameters_can_be_frozen_for_some_epochs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    initial, seen = model[0].weight.detach().clone(), []

    def epoch_start(*, epoch: int, model: Any, **_: Any) -> None:
        seen.append(torch.equal(model[0].weight, initial))
        model[0].requires_grad_(epoch > 1)

    train(tmp_path, model, epoch_start=epoch_start)
    assert seen == [True, True]
    assert not torch.equal(model[0].weight, initial)


def test_lazy_modules_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected parameters that have a size, got uninitialized ones: 0.weight, 0.bias"):
        train(tmp_path, nn.Sequential(nn.LazyLinear(2)))


def test_buffers_without_values_in_memory_are_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("cache", torch.eye(2).to_sparse(), persistent=False)
    model.register_buffer("table", torch.eye(2).to_sparse())
    model.register_buffer("mask", torch.ones(2, device="meta"))
    with pytest.raises(ConfigError, match=r"got others: table \(torch.sparse_coo\), mask \(meta\) \("):
        train(tmp_path, model)


def test_a_scripted_model_trains(tmp_path: Path) -> None:
    train(tmp_path, torch.jit.script(nn.Linear(3, 2)))
