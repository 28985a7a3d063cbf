"""A training on Lhotse's cuts that is stopped within an epoch continues with another number of ranks."""

from collections import Counter
from pathlib import Path

import numpy
import pytest
from launching import TOY
from trainings import Run, Trained, trains

lhotse = pytest.importorskip("lhotse")

pytestmark = pytest.mark.slow

CUTS = 90
FIRST, SECOND = Run("torch", "horovod", 3), Run("torch", "horovod", 2)
STOP = 2


def write_cuts(folder: Path) -> Path:
    """A manifest of cuts with stored features of four numbers."""
    if not (folder / "cuts.jsonl.gz").exists():
        folder.mkdir(parents=True)
        generator = numpy.random.RandomState(1)
        cuts = []
        with lhotse.NumpyHdf5Writer(folder / "features.h5") as writer:
            for number in range(CUTS):
                frames = int(generator.randint(3, 9))
                values = generator.rand(frames, 4).astype(numpy.float32)
                stored = lhotse.Features(
                    type="made up", num_frames=frames, num_features=4, frame_shift=0.01, sampling_rate=16000, start=0,
                    duration=frames * 0.01, storage_type=writer.name, storage_path=str(folder / "features.h5"),
                    storage_key=writer.write(f"cut{number}", values), recording_id=f"cut{number}", channels=0,
                )  # fmt: skip
                cuts.append(lhotse.MonoCut(f"cut{number}", 0, frames * 0.01, 0, features=stored))
        lhotse.CutSet.from_cuts(cuts).to_file(folder / "cuts.jsonl.gz")
    return folder


def keys(folder: Path) -> dict[str, object]:
    shared = folder.parent.parent / "lhotse-chain"
    configs = [TOY, TOY.with_name("lhotse_cuts.py")]
    model = shared / "training" / "model"
    return {
        "configs": configs,
        "folder": write_cuts(shared / "cuts"),
        "model": model,
        "max_seqs": 4,
        "num_epochs": 2,
        "record": True,
    }


@trains(slow=[FIRST])
def stopped(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return {"chain": keys(folder) | {"fault": f"SIGTERM,0,{STOP}", "once": True}}


@trains(slow=[SECOND], after=FIRST)
def resumed(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return {"chain": keys(folder)}


def test_two_ranks_go_on_with_what_three_have_left(trained: Trained) -> None:
    first, second = trained(stopped, FIRST), trained(resumed, SECOND)
    assert f"stopped by SIGTERM in epoch 1 after step {STOP + 2};" in first.out("chain")
    used = first.trained_on("chain") + second.trained_on("chain")
    assert used == Counter({(epoch, number): 1 for epoch in (1, 2) for number in range(CUTS)})
    assert [line["epoch"] for line in second.reports("chain")] == [1, 2]
