"""What each launcher makes of how its ranks end, and what errors say of it."""

import os
import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.comm.launchers import Launcher, Place, check_variables, launcher_of, launchers
from hvdtrain.errors import ConfigError, DamagedCheckpoint, HvdtrainError, LaunchError, Outcome, PeerFailure, TrainingError
from hvdtrain.plugins.horovod import elastic
from hvdtrain.plugins.torchrun.failures import Failure, read
from hvdtrain.runtime.interrupt import Stopped

ELASTIC = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_ELASTIC": "1"}
NGPU = {"HVDTRAIN_RANK": "1", "HVDTRAIN_SIZE": "2", "HVDTRAIN_LOCAL_RANK": "1", "HVDTRAIN_LOCAL_SIZE": "2"}


def torchrun(folder: Path, attempt: int = 0) -> dict[str, str]:
    """The environment of a rank of one of two hosts, whose torchrun may restart it."""
    errors = folder / f"attempt_{attempt}" / "0"
    errors.mkdir(parents=True, exist_ok=True)
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {**ranks, "TORCHELASTIC_ERROR_FILE": str(errors / "error.json"), "TORCHELASTIC_MAX_RESTARTS": "3"}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Horovod's elastic driver: what it gets, in order. It has no rank for any process any more."""
    asked: list[str] = []

    def start_again(environ: Mapping[str, str], *, after_stop: bool) -> str:
        asked.append("stop" if after_stop else "failure of a peer")
        return "no rank"

    monkeypatch.setattr(elastic, "start_again", start_again)
    monkeypatch.setattr(elastic, "report_error", lambda environ: asked.append("error"))
    return asked


def test_horovods_driver_is_asked_for_a_rank_unless_an_error_would_repeat(driver: list[str]) -> None:
    launcher = launcher_of(ELASTIC)
    assert (launcher.name, launcher.restarts) == ("horovodrun", "lost ranks")
    assert launcher.on_failure(PeerFailure("stopped").outcome, "stopped") == " (no rank)"
    assert launcher.on_failure(TrainingError("NaN").outcome, "NaN") == ""
    launcher.on_stop(Stopped("stopped by SIGTERM", repeatable=False).outcome, "")
    launcher.on_stop(Stopped("stopped by SIGUSR1").outcome, "")
    launcher.on_stop(Stopped("stopped by SIGINT", 130).outcome, "")
    assert driver == ["failure of a peer", "error", "stop", "stop", "error"]


@pytest.mark.parametrize("inner", [{}, NGPU])
def test_torchrun_remembers_what_would_repeat_also_through_ngpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: Mapping[str, str]
) -> None:
    monkeypatch.setattr("hvdtrain.comm.launchers.SECONDS_FOR_THE_CAUSE", 0.0)
    launcher = launcher_of(torchrun(tmp_path) | inner)
    assert (launcher.name, launcher.restarts) == ("hvdtrain" if inner else "torchrun", "all ranks")
    launcher.on_failure(PeerFailure("stopped").outcome, "stopped")
    launcher.on_stop(Stopped("stopped by SIGTERM", repeatable=False).outcome, "stopped by SIGTERM")
    launcher.refuse_to_repeat()
    launcher.on_failure(Outcome(1), 'Traceback (most recent call last):\n  File "x"\nValueError: y\nin a batch')
    expected = Failure(1, f"rank {1 if inner else 0} of 2: ValueError: y")
    again = torchrun(tmp_path, attempt=1) | inner
    assert read(again) == expected
    assert launcher_of(again).on_start() is None  # the ranks of the other host have to learn of it
    with pytest.raises(TrainingError, match="not started again after an error that would only repeat .*: ValueError: y"):
        launcher_of(again).refuse_to_repeat()


@pytest.mark.parametrize(
    ("environ", "statuses"), [({}, (1, 1)), (ELASTIC, (1, 1)), (NGPU, (76, 77)), ({"RANK": "0", "WORLD_SIZE": "2"}, (1, 1))]
)
def test_only_hvdtrains_launcher_reads_from_the_status_who_was_first(environ: dict[str, str], statuses: tuple[int, int]) -> None:
    launcher = launcher_of(environ)
    assert (launcher.peer_status, launcher.hung_status) == statuses


def test_a_new_launcher_is_a_class_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Aprun(Launcher):
        name = "aprun"
        variables = (("ALPS_APP_PE", "ALPS_SIZE", "ALPS_LOCAL", "ALPS_LOCAL_SIZE"),)

    kinds = {"aprun": Aprun, **launchers()}
    monkeypatch.setattr("hvdtrain.comm.launchers.launchers", lambda: kinds)
    assert launcher_of({"ALPS_APP_PE": "3", "ALPS_SIZE": "4"}).place == Place("aprun", 3, 4)
    assert launcher_of({}).place == Place(None)


def everywhere(error: HvdtrainError) -> HvdtrainError:
    return pickle.loads(pickle.dumps(error.on_all_ranks()))  # type: ignore[no-any-return]


def test_an_error_of_all_ranks_is_another_one_that_can_be_sent() -> None:
    for error in (ConfigError(["a: b", "c: d"]), DamagedCheckpoint("model.pt: expected"), LaunchError("ngpu: expected")):
        sent = everywhere(error)
        assert (type(sent), str(sent), sent.outcome) == (type(error), str(error), Outcome(2, "all ranks"))
        assert error.outcome == Outcome(2, "this rank")
    stopped = everywhere(Stopped("stopped by SIGTERM", 130, repeatable=False))
    assert stopped.outcome == Outcome(130, "all ranks", repeatable=False)
    failure = PeerFailure("stopped").with_causes(["rank 1 on a has ended"])
    assert (str(failure), failure.status) == ("stopped: rank 1 on a has ended", 1)


def test_where_an_error_was_raised_and_why_is_kept() -> None:
    with pytest.raises(ConfigError) as caught:
        raise ConfigError(["a: b"]) from ValueError("the cause")
    caught.value.add_note("in a batch")
    error = caught.value.on_all_ranks()
    assert error is not caught.value
    assert isinstance(error.__cause__, ValueError)
    assert error.__notes__ == ["in a batch"]
    assert error.__traceback__ is caught.value.__traceback__


def test_nothing_is_set_on_an_error_later() -> None:
    error = TrainingError("NaN")
    with pytest.raises(AttributeError):
        error.on_every_rank = True  # type: ignore[misc]
    with pytest.raises(AttributeError):
        error.status = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        error.outcome.status = 3  # type: ignore[misc]


MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("left_over", "launched", "is_refused"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, MPIRUN, True),  # each rank would train by itself
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, MPIRUN, True),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "host"}, MPIRUN, True),
        ({"RANK": "0", "WORLD_SIZE": "4"}, {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, MPIRUN, False),  # set for a program that reads these
        ({"RANK": "5", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "1"}, MPIRUN, False),  # a torchrun on each host
        ({"RANK": "1", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),  # in a shell of Slurm's
        ({}, MPIRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, False),  # mpirun starts its daemons by srun
        (ELASTIC | {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "host"}, {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, False),
        ({}, {}, False),
    ],
)
def test_left_over_variables_of_another_launcher(left_over: dict[str, str], launched: dict[str, str], is_refused: bool) -> None:
    if not is_refused:
        check_variables(left_over | launched)
        return
    first = next(iter(left_over))
    with pytest.raises(LaunchError, match=f"got {first}=0 and .*, and .*=1 and .*unset {first}, if it is left over"):
        check_variables(left_over | launched)


def test_a_rank_that_nobody_ends_says_why_it_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in MPIRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli, "SECONDS_FOR_RANK_0", 0.0)
    monkeypatch.setattr(os, "_exit", lambda status: None)
    assert cli.main(["no_such_config.py"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("rank 1 of 2: 1 problem in the config:")
    assert "by OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_SIZE=2: unset these, if no launcher has started it" in said
