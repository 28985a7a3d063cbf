"""Batches of frames on several ranks: N ranks learn what one learns, and no frame is lost, also after stops."""

from pathlib import Path

import pytest
from hdf_files import frames_of_epochs
from launching import TOY
from trainings import CONFIGS, ResultsOf, Run, assert_alike, assert_same, marked, trains

FRAMES = TOY.with_name("frames.py")
TWO = Run("torch", "horovod", 2)
SLOW = [Run("torch", "torch.distributed", 3), Run("tensorflow", "horovod", 2)]


@trains(TWO.alone, TWO, slow=[*SLOW, SLOW[1].alone])
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """A step takes the same 60 frames on any number of ranks."""
    shared: dict[str, object] = {"configs": [CONFIGS[run.framework], FRAMES], "evaluated": True}
    shared |= {"num_epochs": 2, "learning_rate": 0.003}
    made: dict[str, dict[str, object]] = {"mean": shared | {"losses": "mean", "gradient_clip_global_norm": 1.0}}
    if run.framework == "torch":
        made["sum"] = shared | {"record": True}
    if run == TWO:
        made["stopped"] = made["sum"] | {"fault": "SIGTERM,1,3,15", "save_interval_steps": 8}
    return made


@pytest.mark.parametrize("run", [TWO, *marked(SLOW, pytest.mark.slow)], ids=str)
def test_ranks_learn_and_score_what_one_rank_does(results: ResultsOf, corpus: Path, run: Run) -> None:
    for name in results(run.alone).names:
        assert_alike(results(run.alone).weights(name), results(run).weights(name), 1e-5)
        pairs = zip(results(run.alone).reports(name), results(run).reports(name), strict=True)
        for one, several in pairs:
            assert several["scores"] == pytest.approx(one["scores"], rel=1e-5)
            assert several["steps"] == one["steps"]
            assert several["padding"] == {"data": 0.0, "classes": 0.0}
    if run.framework == "torch":
        for made in (results(run), results(run.alone)):
            assert made.trained_on("sum") == frames_of_epochs(corpus / "train.hdf", 2), "every frame once an epoch"


def test_a_stop_changes_no_bit(results: ResultsOf) -> None:
    made = results(TWO)
    assert "stopped by SIGTERM in epoch 1" in made.out("stopped")
    assert made.scores("stopped") == made.scores("sum")
    for rank in range(2):
        assert_same(made.weights("sum", rank), made.weights("stopped", rank))
        assert made.needed(f"sum.ids.{rank}").read_text() == made.needed(f"stopped.ids.{rank}").read_text()
