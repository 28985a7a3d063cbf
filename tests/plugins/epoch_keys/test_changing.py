"""Keys that change with the epoch: as if the config were edited between two epochs, on any number of ranks, also after stops."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from launching import TOY, hvdtrain, refused
from trainings import Run, Trained, assert_same, trains

import hvdtrain as hvdtrain_api
from hvdtrain.config.convert import may_take
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.epoch_keys.changing import value_of_dataset
from hvdtrain.plugins.epoch_keys.epoch_settings import settings_of_epoch
from hvdtrain.settings import read_settings

CONFIGS = [TOY, TOY.with_name("epochs.py")]
TWO = Run("torch", "horovod", 2)

EDITS: list[dict[str, object]] = [
    {"max_seqs": 4},
    {"max_seqs": 6, "learning_rates": {2: 0.005}, "part": "even.hdf"},
    {"max_seqs": 4, "parts": 3, "chunking": {"data": 5, "classes": 5, "id": 1}},
    {"max_seqs": 4, "accum_grad_multiple_step": 2, "shuffle_batches": True},
]
"""What the function of epochs.py changes, epoch by epoch, as overrides of config.py."""

STOPS = "10,35,60"
"""The steps before which training is asked to stop, each in another epoch."""


@trains(TWO)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    shared = {"evaluated": True, "layers": "statistics", "record": True}
    whole = {"configs": CONFIGS, "num_epochs": 4, "max_seqs": 4, "average_checkpoints": {"last": 1}, **shared}
    made = {"whole": whole, "stopped": whole | {"fault": f"SIGTERM,1,{STOPS}", "save_interval_steps": 8}}
    for number, edits in enumerate(EDITS, start=1):
        made[f"edited-{number}"] = {"num_epochs": number, "saved_as": "edited", "accept_changed_data": True, **shared, **edits}
    return made


def test_an_epoch_is_that_of_a_config_with_its_keys(trained: Trained) -> None:
    made = trained(trainings, TWO)
    for rank in range(2):
        assert_same(made.weights("whole", rank), made.weights("edited-4", rank))
    whole, edited = made.reports("whole"), made.reports("edited-4")
    for number, (one, other) in enumerate(zip(whole, edited, strict=True), start=1):
        assert [one[key] for key in ("steps", "learning_rate", "padding")] == [
            other[key] for key in ("steps", "learning_rate", "padding")
        ]
        same = {name: one["scores"][name] == other["scores"][name] for name in one["scores"]}
        assert all(is_same or (number == 4 and name.startswith("dev")) for name, is_same in same.items()), (number, same)
    assert whole[3]["scores"]["dev_loss_ce"] != edited[3]["scores"]["dev_loss_ce"]  # of another dev
    [average] = json.loads(made.models["whole"].with_name("averages.json").read_text())
    assert average["scores"]["dev_loss_ce"] == whole[3]["scores"]["dev_loss_ce"], "the average of one model, on the same dev"
    assert [line["learning_rate"] for line in whole] == [0.01, 0.005, 0.005, 0.005]
    assert "epoch 2: max_seqs = 6, learning_rate = 0.005, train = {" in made.out("whole")
    assert made.out("whole").count("max_seqs = 6 holds in its epochs, not the command line's 4") == 1
    assert made.out("whole").count("keys_of_epoch: dev has other data than in other epochs") == 1


def test_a_stop_within_an_epoch_changes_no_bit(trained: Trained) -> None:
    made = trained(trainings, TWO)
    assert made.out("stopped").count("stopped by SIGTERM in epoch") >= 3
    assert made.scores("whole") == made.scores("stopped")
    for rank in range(2):
        assert_same(made.weights("whole", rank), made.weights("stopped", rank))
        assert made.needed(f"whole.ids.{rank}").read_text() == made.needed(f"stopped.ids.{rank}").read_text()


@pytest.mark.slow
def test_ranks_with_other_keys_are_refused_by_all(corpus: Path, tmp_path: Path) -> None:
    keys = {"corpus": corpus, "model": tmp_path / "model", "use_horovod": True, "changing": "by_rank"}
    ended = hvdtrain(TOY, keys, ranks=2, options=[str(CONFIGS[1])])
    assert ended.status == 2
    assert (
        "keys_of_epoch(epoch=1): learning_rate: expected the same on all ranks, got 0.1 on rank 0 and 1.1 on rank 1" in ended.err
    )


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("num_epochs", "keys_of_epoch(epoch=2): unsupported"),
        ("lerning_rate", "keys_of_epoch(epoch=2): unknown-key"),
        ("online_shuffle_batches", ""),
        ("chunking_tail", "chunking_tail: wrong-type"),
        ("dev", "keys_of_epoch(epoch=2): wrong-type"),
    ],
)
def test_keys_are_refused_by_name_before_the_epoch_begins(corpus: Path, tmp_path: Path, key: str, problem: str) -> None:
    keys = {"corpus": corpus, "model": tmp_path / "model", "changing": key, "num_epochs": 2, "evaluated": True}
    ended = hvdtrain(TOY, keys, options=[str(CONFIGS[1])])
    assert (ended.status, list(ended.problems)) == ((2, [problem]) if problem else (0, []))
    assert ("keys_of_epoch(epoch=2)" in ended.err) == bool(problem)
    assert (tmp_path / "model.001.pt").exists()


def test_frames_of_another_shape_are_said_before_the_model_gets_them(corpus: Path, tmp_path: Path) -> None:
    keys = {"corpus": corpus, "model": tmp_path / "model", "num_epochs": 2, "changing": "wider"}
    ended = hvdtrain(TOY, keys, options=[str(CONFIGS[1])])
    wider = "'data': frames of shape (8,) and dimension 8 from keys_of_epoch, the config's train has frames of shape (4,)"
    assert (ended.status, wider in ended.out) == (1, True), ended.out + ended.err


def test_datasets_of_an_epoch_are_read_from_local_copies(corpus: Path, tmp_path: Path) -> None:
    keys = {"corpus": corpus, "model": tmp_path / "model", "num_epochs": 4, "evaluated": True, "cache_dir": tmp_path / "cache"}
    ended = hvdtrain(TOY, keys, options=[str(CONFIGS[1])])
    assert ended.status == 0, ended.err
    copied = {path.name.partition("-")[2] for path in (tmp_path / "cache").glob("*.hdf")}
    assert copied == {"train.hdf", "dev.hdf", "even.hdf", "two.hdf"}


def settings(corpus: Path, **more: Any) -> Any:
    return read_settings(CONFIGS, {name: str(value) for name, value in {"corpus": corpus, "model": corpus / "m", **more}.items()})


def test_conflicts_and_other_datasets_are_problems(corpus: Path) -> None:
    base = settings(corpus, evaluated=True)
    with refused("here: conflict"):
        settings_of_epoch(base, {"frame_batches": True, "chunking": 5}, "here")
    with pytest.raises(ConfigError, match="here: expected the datasets train, dev in every epoch, got train, dev, more"):
        settings_of_epoch(base, {"eval_datasets": {"more": {"files": str(corpus / "two.hdf")}}}, "here")
    changed = settings_of_epoch(
        base, {"batch_size": 7, "train": {"files": str(corpus / "two.hdf"), "partition_epoch": 2}}, "here"
    )
    assert (changed.batch.batch_size, changed.train.order.partition_epoch) == (7, 2)
    assert changed.evaluations[0] is base.evaluations[0]
    assert base.batch.batch_size is None


def test_a_dataset_is_that_of_its_own_key_or_of_eval_datasets() -> None:
    keys = {"dev": "a.hdf", "eval_datasets": {"hard": "b.hdf"}}
    assert [value_of_dataset(name, keys) for name in ("dev", "hard", "eval", "learning_rate")] == ["a.hdf", "b.hdf", None, None]


def test_a_rate_that_no_function_takes_is_refused_or_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def rate(*, global_train_step: int, **_: Any) -> float:
        return 0.1

    keys = {
        "train": [numpy.ones((3, 2), "float32")],
        "get_model": lambda **_: torch.nn.Linear(2, 1),
        "train_step": lambda *, model, extern_data, **_: hvdtrain_api.get_run_ctx().mark_as_loss(
            model(extern_data["data"].raw_tensor).sum((1, 2)), "loss"
        ),
        **{"max_seqs": 1, "num_epochs": 1, "num_threads": 1, "learning_rate": 0.1, "dynamic_learning_rate": rate},
    }
    hvdtrain_api.train(keys, learning_rate_control="newbob", model=str(tmp_path / "told"))
    assert "learning_rate_control: has no effect, as the rate is that of dynamic_learning_rate" in caplog.text
    with pytest.raises(ConfigError, match="learning_rate: expected none, as dynamic_learning_rate does not take it, got 0.5"):
        hvdtrain_api.train(keys, keys_of_epoch=lambda **_: {"learning_rate": 0.5}, model=str(tmp_path / "refused"))
    assert may_take(lambda *, learning_rate, **_: 1, "learning_rate")
    assert may_take(lambda **given: given["learning_rate"], "learning_rate")
