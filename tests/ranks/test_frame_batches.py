"""Batches of frames on several ranks: N ranks learn what one learns, and no frame is lost, also after stops."""

from functools import partial
from pathlib import Path

import pytest
from hdf_files import frames_of_epochs
from launching import TOY
from trainings import CONFIGS, ResultsOf, Run, Trained, assert_alike, assert_same, trains

FRAMES = TOY.with_name("frames.py")
ALONE = [Run(framework, "single", 1) for framework in ("torch", "tensorflow")]
SEVERAL = [Run("torch", "horovod", 2), Run("torch", "torch.distributed", 3), Run("tensorflow", "horovod", 2)]


@trains(*ALONE, *SEVERAL)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """A step takes the same 60 frames on any number of ranks."""
    shared: dict[str, object] = {"configs": [CONFIGS[run.framework], FRAMES], "evaluated": True}
    shared |= {"num_epochs": 2, "learning_rate": 0.003}
    made: dict[str, dict[str, object]] = {"sum": shared, "mean": shared | {"losses": "mean", "gradient_clip_global_norm": 1.0}}
    if run.framework == "torch":
        made["sum"] = shared | {"record": True}
    if run == SEVERAL[0]:
        made["stopped"] = made["sum"] | {"fault": "SIGTERM,1,3,15", "save_interval_steps": 8}
    return made


@pytest.fixture
def results(trained: Trained) -> ResultsOf:
    return partial(trained, trainings)


@pytest.mark.parametrize("run", SEVERAL, ids=str)
def test_ranks_learn_and_score_what_one_rank_does(results: ResultsOf, run: Run) -> None:
    for name in ("sum", "mean"):
        assert_alike(results(run.alone).weights(name), results(run).weights(name), 1e-5)
        pairs = zip(results(run.alone).reports(name), results(run).reports(name), strict=True)
        for one, several in pairs:
            assert several["scores"] == pytest.approx(one["scores"], rel=1e-5)
            assert several["steps"] == one["steps"]
            assert several["padding"] == {"data": 0.0, "classes": 0.0}


def test_every_frame_is_trained_on_once_an_epoch_and_a_stop_changes_no_bit(results: ResultsOf, corpus: Path) -> None:
    for run in (ALONE[0], *SEVERAL[:2]):
        assert results(run).trained_on("sum") == frames_of_epochs(corpus / "train.hdf", 2)
    made = results(SEVERAL[0])
    assert "stopped by SIGTERM in epoch 1" in made.out("stopped")
    assert made.scores("stopped") == made.scores("sum")
    for rank in range(2):
        assert_same(made.weights("sum", rank), made.weights("stopped", rank))
        assert made.needed(f"sum.ids.{rank}").read_text() == made.needed(f"stopped.ids.{rank}").read_text()
