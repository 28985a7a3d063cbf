"""Experiment trackers: what they are told, read back with the services' own readers, and what happens if they fail."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb_files
from documented import example
from inside import run_inside
from launching import TOY, Finished, faults
from report_pages import lines_of

from hvdtrain.errors import ConfigError
from hvdtrain.plugins.trackers.receivers import BackgroundTracker, RunIds
from hvdtrain.plugins.trackers.services import RunDescription, git_state
from hvdtrain.report.epoch import EpochReport
from hvdtrain.report.starts import Start
from hvdtrain.settings import read_settings


def run(corpus: Path, config: Path, **overrides: object) -> Finished:
    """Train: 20 steps an epoch, with a record of every fifth."""
    model = config.parent / "exp" / "model"
    texts = {"corpus": corpus, "model": model, "evaluated": True, "log_interval_steps": 5, **overrides}
    return run_inside([config, *(word for name, value in texts.items() for word in (f"++{name}", value))])


def config_with(folder: Path, code: str) -> Path:
    config = folder / "config.py"
    config.write_text(TOY.read_text() + "\n" + code.replace("exp/", f"{folder}/exp/"))
    return config


@pytest.fixture(scope="module", autouse=True)
def _patient() -> Iterator[None]:
    """However busy the machine is: no tracker is left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hvdtrain.plugins.trackers.receivers.PATIENCE", {"finished": 600.0, "stopped": 600.0, "failed": 600.0})
        yield


def trained_twice(corpus: Path, folder: Path, code: str) -> Path:
    """Where a training of two epochs, and after a resume a third one, left its files."""
    config = config_with(folder, code)
    git = ["git", "-C", folder, "-c", "user.name=n", "-c", "user.email=e@x"]
    for command in (["init", "-q", "-b", "trunk"], ["add", "config.py"], ["commit", "-q", "-m", "begin"]):
        subprocess.run([*git, *command], check=True)
    for num_epochs in (2, 3):
        finished = run(corpus, config, num_epochs=num_epochs)
        assert finished.status == 0, finished.err
        assert "failed" not in finished.out
    return folder / "exp"


OWN = example("reports.md", "class ToFile:")


def test_a_class_of_the_config_receives_everything(corpus: Path, tmp_path: Path) -> None:
    code = OWN + example("reports.md", "def track_epoch(*, epoch, step, metrics, **_):")
    exp = trained_twice(corpus, tmp_path, f"{code}\ntrack_best_model = True\n")
    reports, steps = lines_of(exp / "scores.jsonl"), lines_of(exp / "steps.jsonl")
    expected = []
    for epoch, report in enumerate(reports, start=1):
        before = 20 * (epoch - 1)
        if epoch in (1, 3):
            expected.append(f"begin exp {2 if epoch == 1 else 3} {'None' if epoch == 1 else 'the-id-of-the-run'}")
        own = [one for one in steps if one["epoch"] == epoch]
        expected += [f"steps {epoch} {before + one['step']} {one['scores']['ce']}" for one in own]
        expected.append(f"epoch {epoch} {report['global_step']} {report['scores']['train_loss_ce']}")
        if epoch in (2, 3):
            best = min(reports[:epoch], key=lambda one: one["scores"]["dev_loss_ce"])["epoch"]
            expected += [f"artifact report {exp}/report.html", f"artifact model {exp}/model.00{best}.pt", "end finished"]
    assert (exp / "tracked.txt").read_text().splitlines() == expected
    assert len(steps) == 3 * 4
    dev = [line.split() for line in (exp / "dev.txt").read_text().splitlines()]  # what track_epoch wrote
    assert [float(score) for _, _, score in dev] == [report["scores"]["dev_loss_ce"] for report in reports]


@pytest.fixture(scope="module")
def tracked(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a training left that both services and a class of the config track."""
    services = example("reports.md", "trackers = [").replace("trackers", "services")
    code = f"{services}\n{OWN}\ntrackers += services\n"
    yield trained_twice(corpus, tmp_path_factory.mktemp("tracked"), code)
    import wandb

    wandb.teardown()


@pytest.mark.slow
def test_mlflow_reads_what_was_written(tracked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=str(tracked / "mlruns"))
    experiment = client.get_experiment_by_name("g2p")
    [run] = client.search_runs([experiment.experiment_id])  # one run: it was continued
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "exp"
    params, tags = run.data.params, run.data.tags
    assert (params["num_epochs"], tags["resumed.num_epochs"]) == ("2", "3")
    assert (params["learning_rate"], params["backend"], params["num_ranks"]) == ("0.01", "torch", "1")
    assert "rank 0: " in params["hosts"]
    assert re.fullmatch("[0-9a-f]{40}", tags["mlflow.source.git.commit"])
    assert (params["git.branch"], params["git.dirty"]) == ("trunk", "False")
    reports = lines_of(tracked / "scores.jsonl")
    dev = client.get_metric_history(run.info.run_id, "dev/ce")
    assert [(one.step, one.value) for one in dev] == [(r["global_step"], r["scores"]["dev_loss_ce"]) for r in reports]
    assert [one.step for one in client.get_metric_history(run.info.run_id, "steps/learning_rate")] == list(range(5, 61, 5))
    [page] = client.list_artifacts(run.info.run_id, "report")
    assert page.path == "report/report.html"
    assert page.file_size == (tracked / "report.html").stat().st_size


@pytest.mark.slow
def test_wandb_reads_what_was_written(tracked: Path) -> None:
    """As far as it can be read without sending it: with wandb's own messages."""
    first, second = sorted((tracked / "wandb").glob("offline-run-*/*.wandb"))
    assert first.name == second.name  # the same id: `wandb sync` makes one run of them
    config = wandb_files.config(first)
    assert (config["num_epochs"], config["learning_rate"], config["num_ranks"]) == (2, 0.01, 1)
    assert config["git"]["branch"] == "trunk"
    rows = [*wandb_files.history(first), *wandb_files.history(second)]
    reports = lines_of(tracked / "scores.jsonl")
    dev = [(row["step"], row["dev/ce"]) for row in rows if "dev/ce" in row]
    assert dev == [(report["global_step"], report["scores"]["dev_loss_ce"]) for report in reports]
    assert [row["step"] for row in rows if "steps/learning_rate" in row] == list(range(5, 61, 5))
    for file in (first, second):
        [artifact] = [one.artifact for one in wandb_files.records(file) if one.WhichOneof("record_type") == "artifact"]
        assert artifact.type == "report"
        [exit] = [one.exit for one in wandb_files.records(file) if one.WhichOneof("record_type") == "exit"]
        assert exit.exit_code == 0


FAILING = """
class Failing:
    def __init__(self, begins=False):
        self.begins = begins

    def begin(self, run):
        if not self.begins:
            raise RuntimeError("no such service")

    def log_epoch(self, epoch, step, numbers):
        raise RuntimeError(f"not reached in epoch {epoch}")


trackers = [Failing, {"class": Failing, "begins": True}]


def track_epoch(*, epoch, **_):
    raise KeyError(epoch)
"""


def test_a_tracker_that_fails_is_reported_once_and_training_goes_on(corpus: Path, tmp_path: Path) -> None:
    finished = run(corpus, config_with(tmp_path, FAILING), num_epochs=2)
    assert finished.status == 0, finished.err
    told = [line for line in finished.out.splitlines() if "failed" in line and "track" in line]
    assert set(told) == {
        "trackers: Failing failed in begin, training continues without it: RuntimeError: no such service",
        "trackers: Failing (1) failed in log_epoch, training continues: RuntimeError: not reached in epoch 1",
        "trackers: 2 calls of Failing (1) failed",
        "track_epoch failed after epoch 1, training continues: KeyError: 1",
    }
    assert len(told) == 4


def test_what_a_training_is_that_was_stopped_or_failed(corpus: Path, tmp_path: Path) -> None:
    stops = "\nclass Stop:\n    def on_train_begin(self, training):\n        training.stop('enough')\n\ncallbacks = Stop()\n"
    finished = run(corpus, config_with(tmp_path, OWN + stops), num_epochs=50)
    assert finished.status == 75
    tracked = tmp_path / "exp" / "tracked.txt"
    assert tracked.read_text().splitlines()[-1] == "end stopped"
    finished = run(corpus, config_with(tmp_path, OWN), num_epochs=50, fault="raise,0,60", record=tmp_path / "record")
    assert finished.status == 1
    assert tracked.read_text().splitlines()[-1] == "end failed"


def test_trackers_end_that_began_before_one_could_not(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, make = threading.Thread.start, BackgroundTracker.__init__
    twice = "\ntrackers = 2 * (trackers if isinstance(trackers, list) else [trackers])\n"

    def starts(thread: threading.Thread) -> None:
        if thread.name.startswith("tracker ") and thread.name.endswith("(1)"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    finished = run(corpus, config_with(tmp_path, OWN + twice))
    assert finished.status == 0, finished.err
    assert "(1) failed in begin, training continues without it: RuntimeError: can't start new thread" in finished.out
    assert (tmp_path / "exp" / "tracked.txt").read_text().splitlines()[-1] == "end finished"

    def fails(self: BackgroundTracker, label: str, *arguments: Any) -> None:
        if label.endswith("(1)"):
            raise EOFError
        make(self, label, *arguments)

    monkeypatch.setattr(BackgroundTracker, "__init__", fails)
    assert run(corpus, config_with(tmp_path, OWN + twice), num_epochs=2).status == 1
    assert (tmp_path / "exp" / "tracked.txt").read_text().splitlines()[-1] == "end failed"


REPORT = EpochReport(1, 10, 10, 1.0, 0.9, 0.1, 100, {"train_loss_ce": 2.0})
RUN = RunDescription("exp", Path("exp"), None, 0, {}, {}, Start([("host", "CPU")], {}, 1, 5))


class Slow:
    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.logged: list[int] = []

    def log_epoch(self, epoch: int, step: int, numbers: dict[str, float]) -> None:
        self.may_go_on.wait()
        self.logged.append(step)


def test_a_slow_service_does_not_hold_training_up(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    tracker = BackgroundTracker("slow", lambda: slow)
    tracker.begin(RUN)
    for _ in range(3):
        tracker.epoch(REPORT)  # returns at once, or this test hangs
    tracker.request_end("finished", {})
    tracker.wait(0.1)
    assert "trackers: slow is still busy and was abandoned" in caplog.text
    slow.may_go_on.set()
    tracker.wait(60)
    assert slow.logged == [10, 10, 10]


def test_an_id_is_noted_for_the_next_start(tmp_path: Path) -> None:
    ids = RunIds(tmp_path)
    assert ids.read() == {}
    ids.store("one", "1")
    ids.store("two", "2")
    ids.store("one", "3")
    assert RunIds(tmp_path).read() == {"one": "3", "two": "2"}
    (tmp_path / "trackers.json").write_text('{"one": ')
    assert ids.read() == {}


def test_no_repository_no_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {}
    assert git_state(tmp_path / "missing") == {}


def test_mistakes(tmp_path: Path) -> None:
    def problems(trackers: str) -> list[str]:
        config = config_with(tmp_path, f"{FAILING}\ntrackers = {trackers}\n")
        with pytest.raises(ConfigError) as raised:
            read_settings([config], {"model": str(tmp_path / "model")})
        return faults(raised.value.problems)

    assert problems(
        '["tensorboard", "wandbb", {"class": "wandb", "projekt": "p"}, {"class": "mlflow", "tracking_uri": "m"}]'
    ) == [
        "trackers[1]: unknown-value",
        "trackers[2]: wrong-signature",
    ]
    with pytest.raises(
        ConfigError, match="'mlflow', 'tensorboard' or 'module:Class', got 'tensorbord' .did you mean tensorboard"
    ):
        read_settings([config_with(tmp_path, "trackers = 'tensorbord'")], {})
    assert problems('type("T", (), {"log_step": print})') == ["trackers: wrong-type"]
    assert problems("print") == ["trackers: wrong-type"]


@pytest.mark.parametrize("package", ["wandb", "mlflow", "tensorboard"])
def test_a_missing_package_is_reported_before_the_data_are_opened(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    keys: dict[str, Any] = {"use_tensorboard": True} if package == "tensorboard" else {"trackers": package}
    finished = run(tmp_path / "no-corpus", TOY, model=tmp_path / "model", **keys)
    assert finished.status == 2
    installed_by = {"mlflow": "mlflow-skinny"}.get(package, package)
    expected = f"{next(iter(keys))}: expected the package {package}, got none (pip install {installed_by})"
    assert finished.err.splitlines() == ["1 problem in the config:", f"  {expected}"]


def test_that_no_report_page_can_be_drawn_is_said_at_the_start(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    code = "class Own:\n    def log_epoch(self, epoch, step, numbers): pass\ntrackers = Own"
    finished = run(corpus, config_with(tmp_path, code), num_epochs=1)
    assert finished.status == 0, finished.err
    _, _, after = finished.out.partition("(pip install plotly)")
    assert "epoch 1/1" in after
    assert "pip install plotly" not in after
