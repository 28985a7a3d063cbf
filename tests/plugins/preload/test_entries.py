"""preload_from_files beyond the plain case: constant parameters, parameters in no file, values that the config makes itself."""

import json
from pathlib import Path

import pytest
import torch
from launching import TOY, refused
from trainings import Run, Trained, trains

from hvdtrain.cli import run_task
from hvdtrain.errors import CheckpointError
from hvdtrain.learner.base import Learner
from hvdtrain.plugins.preload.keys import parse_preloads
from hvdtrain.run import train
from hvdtrain.settings import Settings, read_settings

Weights = dict[str, torch.Tensor]


def settings_of(corpus: Path, model: Path, more: str, **overrides: object) -> Settings:
    """The toy with some lines more."""
    config = model.parent / f"{model.name}.py"
    config.write_text(more)
    texts = {"corpus": corpus, "part": "two.hdf", "max_seqs": 1, "model": model / "model", **overrides}
    return read_settings([TOY, config], {name: str(value) for name, value in texts.items()})


def learner_of(settings: Settings) -> Learner:
    """The learner after a training."""
    return train(settings).learner


def stored(file: Path) -> Weights:
    return torch.load(file, weights_only=True)["model"]


@pytest.fixture(scope="module")
def theirs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the toy's first layer, under names without `first.`."""
    folder = tmp_path_factory.mktemp("theirs")
    train(settings_of(corpus, folder / "one", "", num_epochs=1))
    weights = stored(folder / "one" / "model.001.pt")
    first = {name.removeprefix("first."): value + 1 for name, value in weights.items() if name.startswith("first.")}
    torch.save({"model": first, "epoch": 3, "step": 9}, folder / "first.pt")
    return folder / "first.pt"


NEW = {"filename": None, "init_for_train": True}


def entry(theirs: Path, **more: object) -> dict[str, object]:
    return {"filename": str(theirs), "prefix": "first.", **more}


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_always_means_constant_and_not_saved(corpus: Path, theirs: Path, tmp_path: Path, ema_decay: float | None) -> None:
    """RETURNN's meaning; the training continues from checkpoints that lack these parameters, and other tasks load them, too."""
    more = f"preload_from_files = {{'part': {entry(theirs, init_for_train='always')}}}\n"
    more += f"optimizer = {{'class': 'adamw', 'weight_decay': 0.5}}\nema_decay = {ema_decay}"
    whole = settings_of(corpus, tmp_path / "whole", more, num_epochs=3)
    learner = learner_of(whole)
    saved = stored(tmp_path / "whole" / "model.003.pt")
    assert saved
    assert not [name for name in saved if name.startswith("first.")]
    for name, value in stored(theirs).items():
        assert torch.equal(learner.model.state_dict()[f"first.{name}"], value)
    names = torch.load(tmp_path / "whole" / "model.003.opt.pt", weights_only=True)["param_names"]
    assert sorted(names) == sorted(saved)
    for epochs in (1, 3):  # in two goes
        train(settings_of(corpus, tmp_path / "goes", more, num_epochs=epochs))
    again = stored(tmp_path / "goes" / "model.003.pt")
    assert all(torch.equal(saved[name], again[name]) for name in saved)
    assert not torch.equal(saved["last.weight"], stored(tmp_path / "whole" / "model.001.pt")["last.weight"])


def test_other_tasks_load_what_is_always_loaded(
    corpus: Path, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = f"preload_from_files = {{'part': {entry(theirs, init_for_train='always')}}}\ndev = train"
    train(settings_of(corpus, tmp_path / "model", more, num_epochs=1))
    trained = json.loads((tmp_path / "model" / "scores.jsonl").read_text())["scores"]
    capsys.readouterr()
    run_task(settings_of(corpus, tmp_path / "model", more, task="eval"))
    out = capsys.readouterr().out
    for name, value in trained.items():
        if name.startswith("dev_"):
            assert f"{name.removeprefix('dev_loss_')} {value:.4g}" in out


def test_an_evaluation_without_a_model_needs_values_of_all_parameters(corpus: Path, theirs: Path, tmp_path: Path) -> None:
    preloads = {"part": entry(theirs)}

    def evaluated(**keys: object) -> None:
        run_task(settings_of(corpus, tmp_path / "no", f"preload_from_files = {preloads}\ndev = train", task="eval", **keys))

    with pytest.raises(
        CheckpointError, match=r"of the model's parameters, .*, got none for frozen, last.bias, last.weight, unused "
    ):
        evaluated()
    with pytest.raises(CheckpointError, match="load_epoch: expected an epoch that has a model, got 1"):
        evaluated(load_epoch=1)
    preloads["rest"] = {"filename": None, "pattern": "*"}
    evaluated()


TWO = Run("torch", "horovod", 2)


@trains(TWO)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    torch.save({"model": {"weight": torch.ones(8, 4, 3), "bias": torch.ones(8)}}, folder / "first.pt")
    preload = {"part": entry(folder / "first.pt", init_for_train="always")}
    return {"constant": {"preload_from_files": preload, "part": "two.hdf", "max_seqs": 1, "num_epochs": 2}}


def test_two_ranks_keep_them_constant(trained: Trained) -> None:
    made = trained(trainings, TWO)
    assert "preload_from_files.part: the parameters in" in made.out("constant")
    for rank in range(2):
        assert (made.weights("constant", rank)["first.weight"] == 1).all()
    folder = made.models["constant"].parent
    one, two = (stored(folder / f"model.{epoch:03}.pt") for epoch in (1, 2))
    assert one.keys() == two.keys() == {name for name in one if not name.startswith("first.")}
    assert not torch.equal(one["last.weight"], two["last.weight"])


def test_what_no_file_has_is_an_error_unless_it_may_be_missing(
    corpus: Path, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = entry(theirs, init_for_train=True)
    del part["prefix"]
    part["var_name_mapping"] = {"first.weight": "weight", "first.bias": "bias"}
    odd = {"odd": {**NEW, "pattern": "un?sed"}, "zen": {**NEW, "prefix": "frozen"}}
    preloads = {"part": part, **odd}
    with pytest.raises(
        CheckpointError, match=r"part: expected the model's parameters in .*first.pt, got:\n  last.bias: not in the file"
    ):
        train(settings_of(corpus, tmp_path / "one", f"preload_from_files = {preloads}"))
    preloads |= {"new": {**NEW, "pattern": "last.*"}}
    learner = learner_of(settings_of(corpus, tmp_path / "two", f"preload_from_files = {preloads}", learning_rate=0, num_epochs=1))
    assert torch.equal(learner.model.state_dict()["first.weight"], stored(theirs)["weight"])
    preloads["new"] = {**NEW, "prefix": "last."}
    preloads["tasks"] = entry(theirs)
    train(settings_of(corpus, tmp_path / "three", f"preload_from_files = {preloads}", num_epochs=1))
    assert f"preload_from_files.tasks: {theirs} is not loaded in a training ('init_for_train': True" in capsys.readouterr().out
    del preloads["tasks"]
    # What one file lacks another may have.
    torch.save({"model": {"last.weight": torch.ones_like(learner.model.state_dict()["last.weight"])}}, tmp_path / "last.pt")
    last = {"filename": str(tmp_path / "last.pt"), "init_for_train": True}
    preloads = {"part": part, **odd, "last": last, "new": {**NEW, "pattern": "*.bias"}}
    learner = learner_of(
        settings_of(corpus, tmp_path / "four", f"preload_from_files = {preloads}", learning_rate=0, num_epochs=1)
    )
    assert bool((learner.model.state_dict()["last.weight"] == 1).all())


def test_a_function_of_the_config_makes_what_is_missing(corpus: Path, theirs: Path, tmp_path: Path) -> None:
    """It is asked by name and shape for everything that is not in the file, and sees what is, by the names it has here."""
    more = f"""
import torch
def make(*, name, shape, preload_model_state, **_):
    assert set(preload_model_state) == {{"first.weight", "first.bias"}}
    return torch.full(shape, 7.0) if name == "last.weight" else None
preload_from_files = {{"part": {entry(theirs, init_for_train=True)} | {{"custom_missing_load_func": make}}}}
"""
    learner = learner_of(settings_of(corpus, tmp_path / "one", more, learning_rate=0, num_epochs=1))
    assert bool((learner.model.state_dict()["last.weight"] == 7).all())
    assert torch.equal(learner.model.state_dict()["first.bias"], stored(theirs)["bias"])
    with pytest.raises(
        CheckpointError, match=r"custom_missing_load_func: expected values of shape \(.*\) for last.weight, got \(1,\)"
    ):
        train(settings_of(corpus, tmp_path / "two", more.replace("torch.full(shape", "torch.full((1,)")))


def test_mistakes(corpus: Path, tmp_path: Path) -> None:
    for preload, message in (
        ({"filename": "a", "pattern": "b"}, "preload_from_files.x.pattern: conflict"),
        ({"filename": None}, "preload_from_files.x: missing"),
        ({"filename": 3}, "preload_from_files.x.filename: wrong-type"),
        ({"filename": "a", "ignore_params": "b"}, "preload_from_files.x.ignore_params: wrong-type"),
        ({"prefix": "a"}, "preload_from_files.x.filename: missing"),
        ({"filename": "a", "patern": "b"}, "preload_from_files.x.patern: unknown-key"),
        ({"filename": "a", "init_for_train": "allways"}, "preload_from_files.x.init_for_train: wrong-type"),
    ):
        with refused(message):
            settings_of(corpus, tmp_path / "one", f"preload_from_files = {{'x': {preload}}}")
    always = {"filename": "a", "init_for_train": "always"}
    with refused("preload_from_files.x.init_for_train: needs-backend"):
        settings_of(corpus, tmp_path / "one", f"preload_from_files = {{'x': {always}}}", backend="tensorflow")


def test_entries_that_are_none_mean_their_defaults_and_a_missing_file_name_is_named() -> None:
    entry = {"filename": "a.pt", "var_name_mapping": None, "ignore_params": None, "checkpoint_key": None}
    [made] = parse_preloads({"pre": entry})
    assert (made.var_name_mapping, made.ignore_params, made.checkpoint_key) == ({}, [], None)
    with refused("preload_from_files.pre.filename: missing"):
        parse_preloads({"pre": {"prefix": "a."}})
