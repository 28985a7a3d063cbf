"""Callbacks: when they are called, what they see, and what they can ask for."""

import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from documented import example
from inside import run_inside
from launching import TOY, Finished, faults
from trainings import Run, Trained, trains

import hvdtrain
from hvdtrain import engine
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.watchdog.watchdog import JobWatchdog, Patience
from hvdtrain.runtime.interrupt import Stopped
from hvdtrain.settings import read_settings
from hvdtrain.training import notifier
from hvdtrain.training.callbacks import Callbacks

CALLBACKS = """
import json


class Notes:
    def __init__(self, file="events"):
        self.file = str(Path(config.value("model")).with_name(file))

    def note(self, event, training, **more):
        seen = {name: getattr(training, name) for name in ("epoch", "step", "dataset", "rank", "size", "stopped_by")}
        with open(self.file, "a") as file:
            file.write(json.dumps({"event": event, **seen, "scores": sorted(training.scores), **more}) + "\\n")

    def on_train_begin(self, training):
        self.note("train_begin", training, model=type(training.model).__name__)

    def on_epoch_begin(self, training):
        self.note("epoch_begin", training, rate=training.learning_rate)

    def on_step_end(self, training):
        [group] = training.optimizer.param_groups
        self.note("step_end", training, rate=training.learning_rate, same=group["lr"] == training.learning_rate)

    def on_evaluation_begin(self, training):
        self.note("evaluation_begin", training)

    def on_evaluation_end(self, training):
        self.note("evaluation_end", training)

    def on_epoch_end(self, training):
        self.note("epoch_end", training)

    def on_save(self, training):
        self.note("save", training, file=Path(training.checkpoint).name, there=training.checkpoint.exists())

    def on_stop(self, training):
        self.note("stop", training)


class Asks:
    rank_zero_only = True

    def __init__(self, what, when, reason="enough"):
        self.ask = lambda training: getattr(training, what)(reason)
        setattr(self, when, self.ask)

    def on_stop(self, training):
        print("stopped by", training.stopped_by)


class Counts:
    def __init__(self, steps=0):
        self.steps = steps

    def on_step_end(self, training):
        self.steps += 1

    def on_evaluation_end(self, training):
        training.add_score("steps", self.steps)

    def on_epoch_end(self, training):
        training.add_score("steps", self.steps)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Told:
    def __init__(self, what, when):
        setattr(self, when, lambda training: getattr(training, what)())


class Leaves:
    def on_epoch_begin(self, training):
        self.left = training.evaluated_weights()
        self.left.__enter__()


class Fails:
    def on_epoch_end(self, training):
        raise RuntimeError("planted in a callback")


def epoch_start(*, epoch, step, model, dataset_name, **_):
    print(f"start of {dataset_name} in epoch {epoch} at step {step} with a {type(model).__name__}")


def epoch_end(*, epoch, step, model, dataset_name, **_):
    print(f"end of {dataset_name} in epoch {epoch} at step {step}")


callbacks = eval(config.value("told", "[]"))
"""


def run(corpus: Path, folder: Path, told: str, **overrides: object) -> Finished:
    """Train two sequences in two steps an epoch, with callbacks."""
    config = folder / "with_callbacks.py"
    config.write_text(TOY.read_text() + CALLBACKS)
    texts = {"corpus": corpus, "part": "two.hdf", "max_seqs": 1, "model": folder / "model", "told": told, **overrides}
    return run_inside([config, *(word for name, value in texts.items() for word in (f"++{name}", value))])


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events").read_text().splitlines()]


def test_events_come_in_order_with_what_a_callback_may_ask(corpus: Path, tmp_path: Path) -> None:
    finished = run(corpus, tmp_path, "[Notes()]", num_epochs=2, evaluated=True)
    assert finished.status == 0, finished.err
    noted = events(tmp_path)
    epoch = ["epoch_begin", "step_end", "step_end", "evaluation_begin", "evaluation_end", "epoch_end", "save"]
    assert [one["event"] for one in noted] == ["train_begin", *epoch, *epoch, "stop"]
    assert [one["epoch"] for one in noted] == [0, *[1] * 7, *[2] * 7, 2]
    assert [one["step"] for one in noted] == [0, 0, 1, 2, 2, 2, 2, 2, 2, 3, 4, 4, 4, 4, 4, 4]
    assert noted[0]["model"] == "Plain"
    assert {one["rate"] for one in noted if "rate" in one} == {0.01}
    assert all(one["same"] for one in noted if one["event"] == "step_end")
    assert [one["file"] for one in noted if one["event"] == "save"] == ["model.001.pt", "model.002.pt"]
    assert all(one["there"] for one in noted if one["event"] == "save")
    assert {one["dataset"] for one in noted if "evaluation" in one["event"]} == {"dev"}
    assert {one["dataset"] for one in noted if "evaluation" not in one["event"]} == {None}
    training, all_scores = ["train_loss_ce", "train_loss_fer"], ["dev_loss_ce", "dev_loss_fer", "train_loss_ce", "train_loss_fer"]
    assert [one["scores"] for one in noted[1:7]] == [[], [], [], training, all_scores, all_scores]
    assert {(one["rank"], one["size"]) for one in noted} == {(0, 1)}
    assert noted[-1]["stopped_by"] is None
    # RETURNN's hooks, around the training part of an epoch and around each evaluation.
    hooks = [line for line in finished.out.splitlines() if line.startswith(("start of", "end of"))]
    assert hooks[:4] == [
        "start of train in epoch 1 at step 0 with a Plain",
        "end of train in epoch 1 at step 2",
        "start of dev in epoch 1 at step 2 with a Plain",
        "end of dev in epoch 1 at step 2",
    ]
    assert len(hooks) == 8


def test_after_a_callback_the_watchdogs_usual_patience_holds_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callbacks and reports take as long as they need; a rank that is stopped behind them must not have their half hour."""
    beats: list[tuple[str, str]] = []
    beat = JobWatchdog.beat

    def noted(watchdog: JobWatchdog, activity: str, phase: Any = "start-up") -> None:
        beats.append((phase, activity))
        beat(watchdog, activity, phase)

    monkeypatch.setattr(JobWatchdog, "beat", noted)
    finished = run(corpus, tmp_path, "[Notes()]", evaluated=True)
    assert finished.status == 0, finished.err
    unhurried = [number for number, (phase, _) in enumerate(beats) if phase == "unhurried"]
    assert [beats[number][1] for number in unhurried if "another" not in beats[number][1]] == [
        *("on_train_begin of Notes", "on_epoch_begin of EpochFunctions", "on_epoch_begin of Notes"),
        *("on_evaluation_begin of EpochFunctions", "on_evaluation_begin of Notes"),
        *("on_evaluation_end of EpochFunctions", "on_evaluation_end of Notes"),
        *("on_epoch_end of EpochFunctions", "on_epoch_end of Notes"),
        *("on_save of Notes", "reports to services of epoch 1", "on_stop of Notes", "closing the job"),
    ]
    assert {beats[number + 1][0] for number in unhurried[:-1]} == {"unhurried", "between"}
    [saving] = [number for number, (phase, _) in enumerate(beats) if phase == "saving"]
    assert [beats[saving + by] for by in (-1, 1)] == [
        ("finishing", "step 2, waiting for the checkpoint before"),
        ("between", "step 2, after saving"),
    ]
    usual = {phase for phase, _ in beats} - {"start-up", "unhurried"}
    assert usual == {"planning", "between", "steps", "evaluation", "saving", "finishing"}
    assert {Patience(fixed=10.0).seconds(phase) for phase in usual} == {10.0}  # type: ignore[arg-type]

    beats.clear()
    nothing = {"epoch_start": None, "epoch_end": None, "track_epoch": None}
    finished = run(corpus, tmp_path, "list()", num_epochs=2, evaluated=True, **nothing)
    assert finished.status == 0, finished.err
    assert [activity for phase, activity in beats if phase == "unhurried"] == ["closing the job"]
    phases = [phase for phase, _ in beats]
    assert "start-up" not in phases[phases.index("planning") :]


def test_what_may_take_long_is_saved_before_and_may_say_that_it_goes_on(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "LONG", 0.0)
    monkeypatch.setattr(engine, "LONG", 0.0)
    told = '[Told("beat", "on_epoch_end"), Fails()]'
    finished = run(corpus, tmp_path, told)
    assert finished.status == 1
    assert (tmp_path / "model.001.step-2.pt").exists()


def test_weights_that_a_callback_leaves_in_the_model_are_refused(corpus: Path, tmp_path: Path) -> None:
    finished = run(corpus, tmp_path, "Leaves", ema_decay=0.5)
    assert finished.problems == ("on_epoch_begin: wrong-call",), finished.err


def test_a_callback_can_end_training_after_an_epoch(corpus: Path, tmp_path: Path) -> None:
    finished = run(corpus, tmp_path, '[Asks("finish", "on_step_end")]', num_epochs=9, save_interval=5)
    assert finished.status == 0, finished.err
    assert "Finished training in epoch 1: enough." in finished.out
    assert "stopped by enough" in finished.out
    assert (tmp_path / "model.001.pt").exists()  # although save_interval does not say so


def test_the_example_of_the_documents(corpus: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    config.write_text(TOY.read_text() + example("training.md", "class StopWhenGood:").replace("below=1.0", "below=10.0"))
    keys = {"corpus": corpus, "model": tmp_path / "model", "num_epochs": 9, "evaluated": True}
    finished = run_inside([config, *(word for name, value in keys.items() for word in (f"++{name}", value))])
    assert finished.status == 0, finished.err
    assert "Finished training in epoch 1: dev is good enough." in finished.out


def test_a_callback_can_stop_training_with_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    told = '[Asks("stop", "on_epoch_begin"), Notes()]'
    finished = run(corpus, tmp_path, told, num_epochs=50)
    assert finished.status == 75
    assert "stopped by a callback (enough) in epoch " in finished.err
    assert "the same command continues from there" in finished.err
    assert events(tmp_path)[-1]["stopped_by"] == "a callback (enough)"
    done = events(tmp_path)[-1]["step"]
    again = run(corpus, tmp_path, told, num_epochs=50)
    assert again.status == 75
    assert [one["step"] for one in events(tmp_path) if one["event"] == "train_begin"] == [0, done]


def test_a_callback_may_keep_a_state_in_checkpoints_and_add_scores(corpus: Path, tmp_path: Path) -> None:
    assert run(corpus, tmp_path, '[Asks("stop", "on_epoch_begin"), Counts()]', num_epochs=2, evaluated=True).status == 75
    assert run(corpus, tmp_path, "[Counts()]", num_epochs=2, evaluated=True).status == 0
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    for name in ("dev_loss_steps", "train_loss_steps"):
        assert [line["scores"][name] for line in lines] == [2, 4]


def test_an_error_in_a_callback_ends_training_with_its_traceback(corpus: Path, tmp_path: Path) -> None:
    finished = run(corpus, tmp_path, "Fails")
    assert finished.status == 1
    first, second, third, *_ = finished.err.splitlines()
    assert (first, second) == ("RuntimeError: planted in a callback", "Traceback (most recent call last):")
    assert re.fullmatch(r"  \(\d+ calls within hvdtrain, the last one in training/callbacks.py:\d+\)", third)
    assert "in on_epoch_end" in finished.err


def problems(folder: Path, callbacks: str) -> list[str]:
    config = folder / "config.py"
    config.write_text(f"{TOY.read_text()}\n{CALLBACKS}\ncallbacks = {callbacks}\n")
    with pytest.raises(ConfigError) as raised:
        read_settings([config], {"model": str(folder / "model")})
    return faults(raised.value.problems)


def test_mistakes_are_reported_together(tmp_path: Path) -> None:
    assert problems(tmp_path, 'type("Late", (), {"on_epoch_ends": print})') == ["callbacks: wrong-type"]
    assert problems(tmp_path, "__import__('numpy').ones(1)") == ["callbacks: wrong-type"]
    several = (
        '[Notes(), {"class": Notes, "fil": "x"}, "Notes", {"file": "x"}, 3, "nowhere.at:All", {"class": Notes(), "file": ""}]'
    )
    assert problems(tmp_path, several) == [
        "callbacks[1]: wrong-signature",
        "callbacks[2]: unknown-value",
        "callbacks[3]: missing",
        "callbacks[4]: wrong-type",
        "callbacks[5]: cannot-import",
        "callbacks[6]: conflict",
    ]


TWO = Run("torch", "horovod", 2)


@trains(TWO)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """The last rank asks to finish in the second of five epochs, of 20 steps each."""
    return {"noted": {"num_epochs": 5, "noted": f"{folder}/noted,25"}}


def test_all_ranks_are_notified_and_end_together(trained: Trained) -> None:
    results = trained(trainings, TWO)
    for rank in range(2):
        [noted] = results.needed(f"noted.{rank}").read_text().splitlines()
        assert json.loads(noted) == [2, 40, 80, "the last rank wants it"]
    assert results.needed("noted.zero.0").read_text() == "40\n"
    assert not (results.folder / "noted.zero.1").exists()
    assert results.needed("noted.tracked.0").read_text() == "2\n"  # the number of ranks
    assert not (results.folder / "noted.tracked.1").exists()


class Averages:
    """Evaluates an average, which it puts into the model for the time of an evaluation."""

    def on_evaluation_begin(self, training: Any) -> None:
        self.trained = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
        training.model.load_state_dict({name: tensor * 0.5 for name, tensor in self.trained.items()})

    def on_evaluation_end(self, training: Any) -> None:
        training.model.load_state_dict(self.trained)


class StopsInEvaluation(Averages):
    def on_evaluation_begin(self, training: Any) -> None:
        super().on_evaluation_begin(training)
        training.stop("planted")


@pytest.mark.parametrize("more", [{}, {"ema_decay": 0.5}])
def test_weights_that_callbacks_evaluate_are_not_those_of_a_checkpoint(more: dict[str, Any], tmp_path: Path) -> None:
    def train(folder: str, callbacks: Any) -> dict[str, Any]:
        items = [{"data": numpy.full((3, 2), number, "float32")} for number in range(32)]

        def get_model(**_: Any) -> Any:
            return torch.nn.Linear(2, 1)

        def train_step(*, model: Any, extern_data: Any, **_: Any) -> None:
            hvdtrain.get_run_ctx().mark_as_loss(model(extern_data["data"].raw_tensor)[..., 0].square(), "ce")

        keys = {"train": items, "dev": items, "max_seqs": 4, "learning_rate": 1e-4, "num_threads": 1, "num_epochs": 2, **more}
        keys |= {"get_model": get_model, "train_step": train_step, "callbacks": callbacks, "model": str(tmp_path / folder)}
        return dict(hvdtrain.train(keys).model.state_dict())

    whole = train("whole", Averages)
    with pytest.raises(Stopped, match="in the evaluation"):
        train("two", StopsInEvaluation)
    again = train("two", Averages)
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


STOPPED = """
import numpy, os, signal, torch, hvdtrain
train = [{"data": numpy.full((3, 2), number, "float32")} for number in range(32)]
num_epochs, max_seqs, learning_rate, optimizer = 3, 4, 0.01, {"class": "sgd"}
num_allowed_consec_invalid_gradient_steps, stop_on_nonfinite_train_score, num_threads = 6, False, 1
class Callback:
    def on_step_end(self, training):
        if training.step == 3 and config.bool("finishes", False):
            training.finish("good enough")
        if training.step == 6 and config.bool("stops", False):
            training.stop("asked for")
    def on_save(self, training):
        if config.bool("finishes_saved", False):
            training.finish("good enough")
callbacks = Callback
def get_model(**_):
    return torch.nn.Linear(2, 1)
def train_step(*, model, extern_data, **_):
    factor = float("nan") if config.bool("breaks", False) and 2 <= hvdtrain.get_run_ctx().step <= 10 else 1.0
    hvdtrain.get_run_ctx().mark_as_loss(factor * model(extern_data["data"].raw_tensor)[..., 0].square(), "ce")
"""


def test_a_stop_forgets_neither_that_training_ends_nor_how_many_updates_were_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdtrain.training.vote.INTERVAL", 0.0)  # a stop comes two steps after it is asked for
    (tmp_path / "config.py").write_text(STOPPED)

    def status(name: str, *keys: str) -> int:
        words = [word for key in keys for word in (f"++{key}", "1")]
        return run_inside([tmp_path / "config.py", "++model", tmp_path / name / "model", *words]).status

    def epochs(name: str) -> list[str]:
        return sorted(path.name for path in (tmp_path / name).glob("model.0??.pt"))

    assert status("finished", "finishes", "stops") == 75
    assert [status("finished", "finishes"), status("finished", "finishes")] == [0, 0]
    assert epochs("finished") == ["model.001.pt"]
    more = [tmp_path / "config.py", "++model", tmp_path / "finished" / "model", "++num_epochs", "4"]
    assert run_inside(more).status == 0
    assert epochs("finished")[-1] == "model.004.pt", "more epochs than when it was finished"
    assert [status("saved", "finishes_saved"), status("saved")] == [0, 0]
    assert epochs("saved") == ["model.001.pt"], "finished by the callback of its own checkpoint"
    assert [status("stopped", "finishes_saved", "stops"), status("stopped"), status("stopped")] == [75, 0, 0]
    assert epochs("stopped") == ["model.001.pt"], "finished by the callback of the checkpoint of a stop"
    assert status("skipped", "breaks", "stops") == 75
    assert status("skipped", "breaks") == 2, "the seventh update in a row that is not finite"


def test_what_a_checkpoint_could_not_be_read_with_is_refused_and_numbers_of_numpy_are_not() -> None:
    class Keeps:
        kept: Any = {"n": numpy.float32(3), "all": [numpy.int64(2), (1, None)]}

        def state_dict(self) -> Any:
            return self.kept

        def load_state_dict(self, state: Any) -> None: ...

    made = Callbacks([Keeps(), type("Alone", (), {"state_dict": lambda self: object()})()])
    assert repr(made.state()) == "{'Keeps': {'n': 3.0, 'all': [2, (1, None)]}}"
    Keeps.kept = {"n": [numpy.zeros(3)]}
    with pytest.raises(ConfigError, match=r"Keeps.state_dict\(\)\['n'\]\[0\]: expected numbers, texts, lists .* got ndarray"):
        made.state()
