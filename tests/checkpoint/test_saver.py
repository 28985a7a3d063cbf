"""What ranks that save together hear of each other: with PyTorch, on ranks that are threads."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import on_ranks
from torch_ranks import small_model, step

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.loader import Loader
from hvdtrain.checkpoint.progress import EpochProgress, Progress
from hvdtrain.checkpoint.saver import Saver
from hvdtrain.comm.base import Communicator
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.learner.frameworks import BuildOptions
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.reducers import ReduceKeys
from hvdtrain.learner.torch.assembly import Assembly
from hvdtrain.learner.torch.learner import build_learner
from hvdtrain.plugins.frozen_base.parameters import FrozenBase
from hvdtrain.runtime.timer import Timer


def leave_out_base(assembly: Assembly) -> None:
    assembly.make_base = partial(FrozenBase, assembly.model, assembly.constants, True)


def with_frozen_layer(**_: Any) -> torch.nn.Module:
    model = small_model(3)
    model[0].requires_grad_(False)
    return model


def saver_of(comm: Communicator, folder: Path, background: ThreadPoolExecutor) -> tuple[Saver, torch.nn.Module]:
    reducer = ReduceKeys().reducer(comm, Timer())
    keys = LearnerKeys(get_model=with_frozen_layer, train_step=step)
    learner = build_learner(
        keys, reducer.gradients, BuildOptions(rank=comm.rank, local_rank=0, threads=1, seed=1, extensions=[leave_out_base])
    )
    loader = Loader(comm, learner.state, reducer.sync, CheckpointFolder(folder / "model"))
    return Saver(loader, "shard", background=background), learner.model


def at(done: int) -> Progress:
    return Progress(step=done, current=EpochProgress(1, 0, position=done))


def test_a_copy_that_fails_ends_all_ranks_at_the_next_checkpoint(tmp_path: Path) -> None:
    """Rank 0 copies in memory while the others go on with the next step."""

    def work(comm: Communicator) -> str:
        with ThreadPoolExecutor(1) as background:
            saver, model = saver_of(comm, tmp_path, background)
            saver.save(at(1), saver.prepare())
            written = saver.save(at(2), saver.prepare())
            if comm.rank == 0:
                with torch.no_grad():
                    model[0].weight += 1.0
            saver.save(at(3), saver.prepare())
            with pytest.raises(ConfigError) as caught:
                saver.prepare()
            saver.finish()
            assert written.model_file.exists()
            return str(caught.value)

    assert all("save_parameters: expected frozen parameters with the values from get_model" in text for text in on_ranks(2, work))
    newest = CheckpointFolder(tmp_path / "model").newest()
    assert newest is not None
    assert newest.step == 2


def test_a_check_that_fails_on_one_rank_ends_all_before_anything_is_written(tmp_path: Path) -> None:
    def work(comm: Communicator) -> str:
        def check() -> None:
            if comm.rank == 1:
                raise DataError("train.hdf: changed")

        with ThreadPoolExecutor(1) as background:
            saver, _ = saver_of(comm, tmp_path, background)
            with pytest.raises(DataError) as caught:
                saver.prepare(check)
            return str(caught.value)

    assert ["train.hdf: changed" in text and "rank 1" in text for text in on_ranks(2, work)] == [True, True]
    assert CheckpointFolder(tmp_path / "model").newest() is None
