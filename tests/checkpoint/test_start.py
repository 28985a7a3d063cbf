"""Which model a training starts from, which it keeps, and when it ends; on one rank."""

import json
import re
import shutil
from pathlib import Path

import h5py
import numpy
import pytest
import torch
from launching import TOY

import hvdtrain
from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.keys import StartKeys
from hvdtrain.checkpoint.loader import Loader
from hvdtrain.checkpoint.start import StartingPoint, start_of_training
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.errors import CheckpointError, ConfigError, TrainingError
from hvdtrain.plugins.schedules.file import read_learning_rate_file
from hvdtrain.run import train
from hvdtrain.schedule.early_stopping import EarlyStoppingKeys, early_stop_reason
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import Measure
from hvdtrain.settings import read_settings
from hvdtrain.training.limits import TrainingLimits


def run(corpus: Path, model: Path, **overrides: object) -> None:
    """Train in this process."""
    texts = {"corpus": corpus, "part": "two.hdf", "max_seqs": 1, "model": model / "model", **overrides}
    train(read_settings([TOY], {name: str(value) for name, value in texts.items()}))


def stored(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"model.{name}.pt", weights_only=True)["model"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three epochs."""
    folder = tmp_path_factory.mktemp("trained")
    run(corpus, folder, num_epochs=3)
    return folder


def test_a_model_of_a_training_that_a_callback_has_ended_is_trained_further() -> None:
    class State:
        tensors = staticmethod(lambda role: {})
        set_tensors = staticmethod(lambda role, values: None)
        load = staticmethod(lambda *_: {"epoch": 1, "step": 7, "history": [], "finished": ["enough", 3]})

    loader = Loader(SingleCommunicator(), State(), None, CheckpointFolder(Path("other")))  # type: ignore[arg-type]
    progress = loader.load_model(Path("model.001.pt"), None)
    assert progress.epoch == 1
    assert not TrainingLimits(num_epochs=3).are_reached(progress)


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_a_model_that_another_framework_trained_is_refused(tmp_path: Path, kind: str) -> None:
    for name in ("001.opt.pt", f"001.{kind}", "002.step-7.opt.pt", f"002.step-7.{kind}"):
        (tmp_path / f"model.{name}").touch()
    folder = CheckpointFolder(tmp_path / "model", "npz")
    best_within_epoch = CheckpointFolder(tmp_path / "other", "npz", "safetensors")
    (tmp_path / "other.001.step-3.safetensors").touch()
    assert start_of_training(StartKeys(), best_within_epoch).checkpoint is None, "it has no optimizer, and no framework"
    with pytest.raises(CheckpointError) as refused:
        start_of_training(StartKeys(), folder)
    assert str(refused.value) == (
        "model: expected files of backend 'tensorflow' such as model.001.npz, or none, got "
        f"{tmp_path}/model.002.step-7.opt.pt of backend 'torch' (give this training another `model`, or remove "
        f"{tmp_path}/model.*)"
    )
    assert start_of_training(StartKeys(start_epoch=1), folder) == StartingPoint()
    for name in ("001.opt.npz", "001.npz"):
        (tmp_path / f"model.{name}").touch()
    assert start_of_training(StartKeys(), folder).checkpoint == folder.checkpoint_at(1)


def test_a_model_without_its_optimizer_is_not_replaced(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "model")
    (tmp_path / "model.001.step-3.pt").touch()  # an evaluation within the first epoch writes it, before there is an optimizer
    assert start_of_training(StartKeys(), folder) == StartingPoint()
    for name in ("001.pt", "002.pt"):
        (tmp_path / f"model.{name}").touch()
    model = tmp_path / "model.002.pt"
    expected = rf"model: expected .*model.002.opt.pt, .* \(\+\+start_epoch 3 \+\+load {model} continues with a new optimizer; "
    with pytest.raises(CheckpointError, match=expected):
        start_of_training(StartKeys(), folder)
    assert start_of_training(StartKeys(start_epoch=3, load=str(model)), folder) == StartingPoint(model_file=model, epoch=2)
    assert start_of_training(StartKeys(start_epoch=1), folder) == StartingPoint()
    elsewhere = tmp_path / "other.001.pt"
    elsewhere.touch()
    with pytest.raises(CheckpointError, match=expected):
        start_of_training(StartKeys(load=str(elsewhere)), folder)
    assert start_of_training(StartKeys(load=str(model)), folder) == StartingPoint(model_file=model)
    imported = start_of_training(
        StartKeys(load=str(model), import_model_train_epoch1=str(model)), CheckpointFolder(tmp_path / "new")
    )
    assert imported.remark == "load: ignored, as import_model_train_epoch1 is set"


def test_a_new_model_in_the_folder_of_another_one_is_told(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "two")
    assert start_of_training(StartKeys(), folder).remark is None
    for name in ("one.003.opt.pt", "one.003.pt", "scores.jsonl"):
        (tmp_path / name).touch()
    assert "has another model, too: scores.jsonl" in str(start_of_training(StartKeys(), folder).remark)
    for name in ("two.001.opt.pt", "two.001.pt"):
        (tmp_path / name).touch()
    assert start_of_training(StartKeys(), folder) == StartingPoint(folder.checkpoint_at(1))


def test_load_goes_on_after_the_models_epoch_and_steps(
    corpus: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(corpus, tmp_path, load=trained / "model.002", num_epochs=3, optimizer={"class": "sgd"})
    assert "model.002.pt: training continues after epoch 2, step 4." in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best.json",
        "ends.jsonl",
        "model.003.opt.pt",
        "model.003.pt",
        "scores.jsonl",
        "starts.jsonl",
        "steps.jsonl",
        "summary.json",
    ]
    run(corpus, tmp_path, load=trained / "model", load_epoch=1, num_epochs=3)
    assert "load: ignored, as there is a checkpoint already" in capsys.readouterr().out


def test_start_epoch(corpus: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        run(corpus, tmp_path, num_epochs=number)
    run(corpus, tmp_path, num_epochs=3)
    whole = stored(tmp_path, "003")
    assert same(whole, stored(trained, "003"))
    run(corpus, tmp_path, num_epochs=3, start_epoch=3)
    assert "start epoch 3 global train step 4" in capsys.readouterr().out
    assert same(whole, stored(tmp_path, "003"))
    with pytest.raises(CheckpointError, match=r"expected a complete checkpoint of epoch 1, got no .*model.001.opt.pt"):
        run(corpus, tmp_path, num_epochs=3, start_epoch=2)
    run(corpus, tmp_path, num_epochs=2, start_epoch=2, load=trained / "model.003.pt")
    assert "start epoch 2 global train step 6" in capsys.readouterr().out
    run(corpus, tmp_path, num_epochs=1, start_epoch=1)
    assert "training begins with epoch 1: its first checkpoint replaces its model" in capsys.readouterr().out
    assert same(stored(tmp_path, "001"), stored(trained, "001"))
    assert [json.loads(line)["epoch"] for line in (tmp_path / "scores.jsonl").read_text().splitlines()] == [1]
    run(corpus, tmp_path, num_epochs=2)
    assert sorted(path.name for path in tmp_path.glob("*.abandoned")) == ["model.002.pt.abandoned", "model.003.pt.abandoned"]
    assert same(stored(tmp_path, "002"), stored(trained, "002")), "not from the newest model of before"


def test_load_epoch_goes_back(corpus: Path, tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(corpus, tmp_path, num_epochs=3)
    run(corpus, tmp_path, num_epochs=3, load_epoch=2)
    assert "start epoch 3 global train step 4" in capsys.readouterr().out
    assert same(stored(tmp_path, "003"), stored(trained, "003"))


def test_import_begins_with_epoch_1(corpus: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(corpus, tmp_path, import_model_train_epoch1=trained / "model.003.pt", learning_rate=0)
    assert "start epoch 1 global train step 6" in capsys.readouterr().out
    assert same(stored(tmp_path, "001"), stored(trained, "003"))


def test_a_file_in_returnns_format_is_loaded(corpus: Path, trained: Path, tmp_path: Path) -> None:
    model = {"model": stored(trained, "003"), "epoch": 7, "step": 70, "effective_learning_rate": 0.5, "returnn_version": "1.2"}
    torch.save(model, tmp_path / "their.007.pt")
    run(corpus, tmp_path, load=tmp_path / "their", load_epoch=7, num_epochs=8, learning_rate=0)
    ours = torch.load(tmp_path / "model.008.pt", weights_only=True)
    assert same(ours["model"], model["model"])
    assert (ours["epoch"], ours["step"]) == (8, 72)


def test_a_folder_of_another_program_is_read_by_a_function(corpus: Path, trained: Path, tmp_path: Path) -> None:
    keys = {"corpus": str(corpus), "part": "two.hdf", "max_seqs": 1, "load": str(trained), "learning_rate": 0.0, "num_epochs": 5}

    def start(found: dict[str, object], model: str) -> dict[str, torch.Tensor]:
        made = hvdtrain.train(TOY, checkpoint_reader=lambda path: found, model=str(tmp_path / model), **keys).model
        return dict(made.state_dict())

    theirs = stored(trained, "003")
    assert same(start({"model": theirs, "epoch": 4}, "model"), theirs)
    assert sorted(path.name for path in tmp_path.glob("model.*.pt")) == ["model.005.opt.pt", "model.005.pt"]
    own = hvdtrain.evaluate(
        TOY, checkpoint_reader=lambda path: {}, model=str(tmp_path / "model"), evaluated=True, **keys | {"load": None}
    )
    assert own, "it is for the files of others"
    with pytest.raises(CheckpointError, match="checkpoint_reader: expected a dict with 'model', or None, got weights"):
        start({"weights": theirs}, "other")


def test_a_model_without_a_history_has_that_of_the_learning_rate_file(corpus: Path, trained: Path, tmp_path: Path) -> None:
    elsewhere = {"model": stored(trained, "003"), "epoch": 3, "step": 6}
    torch.save(elsewhere, tmp_path / "returnn.003.pt")
    # The error got worse from epoch 2 to 3, so newbob decays before epoch 4; what the file has of epoch 4 is of no use here.
    scores = {1: 2.0, 2: 1.0, 3: 1.5, 4: 0.1}
    records = [f"{epoch}: EpochData(learningRate=0.02, error={{'dev_score': {score}}}),\n" for epoch, score in scores.items()]
    (tmp_path / "rates").write_text("{\n" + "".join(records) + "}\n")
    overrides = {"load": tmp_path / "returnn.003.pt", "learning_rate_file": tmp_path / "rates", "num_epochs": 4}
    run(corpus, tmp_path, **overrides, learning_rate_control="newbob")
    assert [record.learning_rate for record in read_learning_rate_file(tmp_path / "rates")] == [0.02, 0.02, 0.02, 0.01]


def test_a_checkpoint_with_code_in_it_is_refused(corpus: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (print, ("code of a checkpoint was run",))

    torch.save({"model": {"first.weight": Evil()}}, tmp_path / "evil.pt")
    for name in ("load", "import_model_train_epoch1"):
        with pytest.raises(CheckpointError, match=r"evil.pt: expected tensors and plain values, got a file that needs code"):
            run(corpus, tmp_path / "new", **{name: tmp_path / "evil.pt"})
        with pytest.raises(CheckpointError, match=f"^{name}: expected a model file, got no .*nothing.pt$"):
            run(corpus, tmp_path / "new", **{name: tmp_path / "nothing.pt"})


def test_preload_takes_named_parameters_over(corpus: Path, trained: Path, tmp_path: Path) -> None:
    theirs = stored(trained, "003")
    torch.save({"weight": theirs["first.weight"], "offset": theirs["first.bias"]}, tmp_path / "part.pt")
    part = {
        "filename": str(tmp_path / "part.pt"),
        "prefix": "first.",
        "init_for_train": True,
        "var_name_mapping": {"bias": "offset"},
        "checkpoint_key": None,
    }
    preload = {"b_part": part, "c_all": {"filename": str(trained / "model.001.pt"), "init_for_train": True}}
    run(corpus, tmp_path, preload_from_files=preload, learning_rate=0)
    ours = stored(tmp_path, "001")
    assert torch.equal(ours["first.weight"], theirs["first.weight"])  # b_part comes first by name, so it wins
    assert torch.equal(ours["first.bias"], theirs["first.bias"])
    assert torch.equal(ours["last.weight"], stored(trained, "001")["last.weight"])
    run(corpus, tmp_path, preload_from_files={"gone": {"filename": "no.pt", "init_for_train": True}}, num_epochs=2)  # not fresh

    missing = {"x": {"filename": str(tmp_path / "part.pt"), "init_for_train": True, "prefix": "last.", "checkpoint_key": None}}
    with pytest.raises(CheckpointError, match=r"model's parameters last.\* in .*part.pt, got:\n  last.weight of shape"):
        run(corpus, tmp_path / "other", preload_from_files=missing)
    missing["x"] |= {"var_name_mapping": {"weight": "none"}, "ignore_missing": True, "ignore_params": ["last.bias"]}
    with pytest.raises(CheckpointError, match=r"none of its names \(weight, offset"):
        run(corpus, tmp_path / "other", preload_from_files=missing)


def test_save_interval_and_cleanup(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path, num_epochs=7, save_interval=3)
    assert sorted(path.name for path in tmp_path.glob("model.???.pt")) == ["model.003.pt", "model.006.pt", "model.007.pt"]
    assert len((tmp_path / "scores.jsonl").read_text().splitlines()) == 7
    cleanup = {"keep_last_n": 1, "keep_best_n": 0, "keep": [3]}
    run(corpus, tmp_path, num_epochs=9, cleanup_old_models=cleanup)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best.json",
        "ends.jsonl",
        "model.003.pt",
        "model.009.opt.pt",
        "model.009.pt",
        "scores.jsonl",
        "starts.jsonl",
        "steps.jsonl",
        "summary.json",
    ]


def test_early_stopping() -> None:
    keys = EarlyStoppingKeys(early_stopping_patience=2)
    scores = [3.0, 2.0, 2.5, 1.9, 2.0, 1.95]
    history = [EpochRecord(epoch, 0.1, {"dev_loss_ce": score}) for epoch, score in enumerate(scores, start=1)]
    ends = [early_stop_reason(keys, history[:epoch], Measure()) is not None for epoch in range(7)]
    assert ends == [False, False, False, False, False, False, True]
    assert early_stop_reason(keys, history, Measure()) == "dev_loss_ce was best after epoch 4 (1.9), early_stopping_patience is 2"
    strict = EarlyStoppingKeys(early_stopping_patience=2, early_stopping_min_difference=0.5)
    reason = early_stop_reason(strict, history[:4], Measure())
    assert reason == "dev_loss_ce was best after epoch 2 (2), early_stopping_patience is 2"
    assert early_stop_reason(EarlyStoppingKeys(), history, Measure()) is None


def test_a_training_that_ended_early_stays_ended(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = {"num_epochs": 50, "learning_rate": 0, "early_stopping_patience": 2, "save_interval": 10}
    run(corpus, tmp_path, **overrides)
    assert "Finished training in epoch 3: train_loss_ce was best after epoch 1" in capsys.readouterr().out
    assert (tmp_path / "model.003.pt").exists()
    run(corpus, tmp_path, **overrides)
    assert "Already trained until final epoch 3, nothing to do: train_loss_ce was best" in capsys.readouterr().out


def test_a_loss_that_is_no_number_ends_training_with_a_report(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        run(corpus, tmp_path, fault="nan,0,1")
    verdict, of_rank, hint = str(caught.value).split("\n  ")
    assert verdict.endswith("got ce = nan in step 1 of epoch 1: the loss itself is the cause, on rank 0")
    assert of_rank.startswith("rank 0: ce = nan in step 1 of epoch 1, sequences seq-")
    assert of_rank.endswith("; its input is finite; parameters that are not finite: none, so the loss itself is the cause")
    assert "stop_on_nonfinite_train_score = False" in hint
    assert not list(tmp_path.glob("*.pt"))
    run(corpus, tmp_path, fault="nan,0,1", stop_on_nonfinite_train_score=False)
    assert stored(tmp_path, "001")["first.weight"].isnan().all()


def test_the_input_of_a_loss_that_is_no_number(corpus: Path, tmp_path: Path) -> None:
    shutil.copyfile(corpus / "train.hdf", tmp_path / "train.hdf")
    with h5py.File(tmp_path / "train.hdf", "r+") as file:
        lengths = file["seqLengths"][:, 0]
        start = int(lengths[:17].sum())
        file["inputs"][start, 2] = numpy.nan
        file["inputs"][start + 1 : start + lengths[17], 1] = -numpy.inf
    for keys in ({}, {"chunking": {"data": 3, "classes": 3, "id": 1}}):
        with pytest.raises(TrainingError) as caught:
            run(tmp_path, tmp_path, part="train.hdf", max_seqs=3, **keys)
        frames = f"'data' has NaN or infinity in {lengths[17]} of {lengths[17]} frames of seq-17"
        assert re.search(r"got ce = nan in step \d+ of epoch 1: its input is the cause, on rank 0\n", str(caught.value))
        assert f"; {frames}; parameters that are not finite: none, so its input is the cause" in str(caught.value)


def test_such_updates_are_left_out_on_request(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "skipped", fault="nan,0,1", num_allowed_consec_invalid_gradient_steps=1)
    line = json.loads((tmp_path / "skipped" / "scores.jsonl").read_text())
    assert isinstance(line["scores"]["train_loss_ce"], float)
    assert stored(tmp_path / "skipped", "001")["first.weight"].isfinite().all()
    with pytest.raises(TrainingError, match=r"expected finite gradients after 1 updates were skipped"):
        run(corpus, tmp_path / "more", fault="nan,0,1,2", num_epochs=2, num_allowed_consec_invalid_gradient_steps=1)


def test_a_write_in_the_background_that_fails_ends_training(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr("hvdtrain.plugins.background.writer.subprocess.Popen", full)  # so that a thread writes
    with pytest.raises(CheckpointError, match=r"model.001.pt: expected to write a checkpoint, got: .*No space left"):
        run(corpus, tmp_path, save_in_background=True, num_epochs=1)


def test_a_folder_that_cannot_be_written_to_is_told_before_training(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"model: expected a folder that can be written to, got .*/file/sub: Not a directory"):
        run(corpus, tmp_path / "file" / "sub")


def test_a_file_to_load_counts_as_the_epoch_that_load_epoch_names(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "model")
    (tmp_path / "other.007.pt").touch()
    file = str(tmp_path / "other.007.pt")
    start = start_of_training(StartKeys(load=file, load_epoch=3), folder)
    assert (start.model_file, start.epoch) == (Path(file), 3)
    by_prefix = start_of_training(StartKeys(load=str(tmp_path / "other"), load_epoch=7), folder)
    assert (by_prefix.model_file, by_prefix.epoch) == (Path(file), None)
    (tmp_path / "other.pt").touch()
    with pytest.raises(
        CheckpointError, match=r"expected one file, got .*other.007.pt and .*other.pt, which would count as epoch 7"
    ):
        start_of_training(StartKeys(load=str(tmp_path / "other"), load_epoch=7), folder)


def test_load_epoch_without_its_model_is_refused_and_with_start_epoch_1_it_is_imported(tmp_path: Path) -> None:
    """It was ignored: the training began from new weights."""
    folder = CheckpointFolder(tmp_path / "model")
    for keys in ({}, {"start_epoch": 1}, {"start_epoch": 3}):
        with pytest.raises(CheckpointError, match="load_epoch: expected"):
            start_of_training(StartKeys(load_epoch=1, **keys), folder)
    (tmp_path / "model.001.pt").touch()
    start = start_of_training(StartKeys(load_epoch=1, start_epoch=1), folder)
    assert (start.model_file, start.epoch) == (tmp_path / "model.001.pt", 0)
