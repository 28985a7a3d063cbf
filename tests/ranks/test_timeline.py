"""Horovod's timeline: by key and by environment, with our names in it."""

from pathlib import Path

import pytest
from launching import TOY, hvdtrain
from timeline import rows_of
from trainings import Run, Trained, trains


@pytest.mark.slow
def test_the_key_writes_a_timeline_with_our_names(corpus: Path, tmp_path: Path) -> None:
    timeline = tmp_path / "new" / "timeline.json"
    overrides = {"corpus": corpus, "model": tmp_path / "model", "use_horovod": 1, "horovod_timeline": timeline}
    finished = hvdtrain(TOY, {**overrides, "log_verbosity": 4}, ranks=2)
    assert finished.status == 0, finished.err
    assert "%|" not in finished.out + finished.err  # no bar where mpirun's output is no terminal
    assert "\r" not in finished.out
    rows = rows_of(timeline)
    gradient = rows["grouped_allreduce.gradients.0_1of6"]  # five parameters, and who has a gradient of which
    assert gradient.count("NEGOTIATE_ALLREDUCE") == 20  # once a step
    assert gradient.count("MPI_ALLREDUCE") == 20
    assert "broadcast.initial_parameters.0" in rows
    for name in ("plan_train", "train_scores", "save"):
        assert "MPI_ALLGATHER" in rows[f"allgather.{name}.first.0"]
    assert not [name for name in rows if "noname" in name]  # what Horovod calls those without a name


RUN = Run("torch", "horovod", 2)


@trains(RUN)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    param = {"horovod_reduce_type": "param", "horovod_param_sync_step": 7}
    return {"param": {**param, "timeline": folder / "timeline.json"}}


def test_horovods_own_environment_does_the_same_and_parameters_have_names_too(trained: Trained) -> None:
    """HOROVOD_TIMELINE, as which the launch has DYNAMIC."""
    rows = rows_of(trained(trainings, RUN).needed("timeline.json"))
    averaged = {
        name: done.count("MPI_ALLREDUCE") for name, done in rows.items() if "grouped_allreduce.average.parameters" in name
    }
    assert averaged
    assert set(averaged.values()) == {3}, averaged  # after 7 and 14 of 20 steps, and at the end of the epoch


@pytest.mark.slow
def test_a_timeline_that_cannot_be_written_is_reported(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    overrides = {"corpus": corpus, "model": tmp_path / "model", "horovod_timeline": tmp_path / "file" / "timeline.json"}
    finished = hvdtrain(TOY, {**overrides, "use_horovod": 1}, ranks=1)
    assert finished.status == 2
    assert "horovod_timeline: expected a writable file, got" in finished.err
    assert "Traceback" not in finished.err
