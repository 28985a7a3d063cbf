"""Trainings with PyTorch on ranks that are threads (`thread_ranks.py`): a small model, its loss, and checkpoints."""

from pathlib import Path
from typing import Any

import torch

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.loader import Loader
from hvdtrain.checkpoint.progress import EpochProgress, Progress
from hvdtrain.checkpoint.saver import Saver
from hvdtrain.comm.base import Communicator
from hvdtrain.context import get_run_ctx
from hvdtrain.learner.reducer import Reducer
from hvdtrain.learner.torch.state import TorchState


def small_model(width: int) -> torch.nn.Module:
    """Takes 4 features. The same on every rank, whatever the order in which threads draw."""
    made = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data.normal_(generator=generator)
    return made


def step(*, model: torch.nn.Module, extern_data: dict[str, Any], **_: Any) -> None:
    values = model(extern_data["data"].raw_tensor).square().sum(-1)
    get_run_ctx().mark_as_loss(values, "square", use_normalized_loss=True)


class SavedRank:
    """A rank that can be stopped and resumed within epoch 1.

    Attributes:
        done: the number of updates so far.
    """

    comm: Communicator
    state: TorchState
    reducer: Reducer
    done: int

    def saver(self, folder: Path) -> Saver:
        return Saver(self.loader(folder), "shard")

    def loader(self, folder: Path) -> Loader:
        return Loader(self.comm, self.state, self.reducer.sync, CheckpointFolder(folder / "model"))

    def save(self, folder: Path) -> None:
        saver = self.saver(folder)
        saver.save(Progress(step=self.done, current=EpochProgress(1, 0, position=self.done)), saver.prepare())

    def load(self, folder: Path) -> None:
        loader = self.loader(folder)
        checkpoint = loader.checkpoints.newest()
        assert checkpoint is not None
        self.done = loader.load(checkpoint).step
