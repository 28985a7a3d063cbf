"""A trainer of another program, in the class of docs/plugins.md: the same weights as in its own loop, also when resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from documented import first_example
from other_trainers import check_resume, difference, state_of, train
from torch.utils.data import DataLoader


class Fitter:
    """Halves the rate after each epoch but the first."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.net = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        self.losses: list[float] = []

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.net(batch) - batch.sum(-1, keepdim=True)).square().mean()

    def epoch_done(self, loss: float) -> None:
        self.losses.append(loss)
        if len(self.losses) > 1:
            self.optimizer.param_groups[0]["lr"] /= 2

    def fit(self, batches: Any, epochs: int) -> None:
        for _ in range(epochs):
            losses = []
            for batch in batches:
                self.optimizer.zero_grad()
                loss = self.loss(batch)
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                losses.append(loss.item() * len(batch))
            self.epoch_done(sum(losses) / len(batches.dataset))


def test_another_trainer_is_a_class_of_its_hooks(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    exec(first_example("plugins.md", "Models of another trainer"), found)  # noqa: S102
    items = list(torch.randn(14, 4, generator=torch.Generator().manual_seed(2)))
    theirs, ours, start = Fitter(), Fitter(), state_of(Fitter().net)
    theirs.fit(DataLoader(items, batch_size=4), 8)  # type: ignore[arg-type]

    def keys(make: Callable[[], Fitter] = Fitter) -> dict[str, Any]:
        return {**found["keys_of"]({"fitter": make}), "train": DataLoader(items, batch_size=4), "num_epochs": 8}  # type: ignore[arg-type]

    weights = train(keys(lambda: ours), tmp_path / "model")
    assert difference(weights, state_of(theirs.net), start) < 1e-6
    assert torch.allclose(torch.tensor(ours.losses), torch.tensor(theirs.losses))
    assert ours.optimizer.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"] == 0.1 / 2**7
    check_resume(keys, tmp_path, 6, weights)
