"""`freeze_until_step` and `save_parameters`: parameters that are not trained for some time, or not at all."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import hvdtrain
from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.plugins.average.__main__ import main


class Model(nn.Module):
    """A pretrained base, which is always the same, with a new layer."""

    def __init__(self, base_seed: int = 1) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(base_seed)
            self.base = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
        self.new = nn.Linear(4, 2)
        self.again = self.base[3]  # the same layer under another name


def train_step(*, model: Model, extern_data: Mapping[str, Any], **_: Any) -> None:
    outputs = model.new(model.base(extern_data["data"].raw_tensor.flatten(0, 1))).sum(-1)
    context = hvdtrain.get_run_ctx()
    context.mark_as_loss((outputs - 1).square(), "square", use_normalized_loss=True)
    context.mark_as_loss(model.new.weight.square().sum(-1), "energy", scale=0.01)


def keys_of(folder: Path, model: Any, **more: Any) -> dict[str, Any]:
    data = [numpy.random.default_rng(number).normal(size=(4, 3)).astype(numpy.float32) for number in range(12)]
    keys = {"train": data, "max_seqs": 2, "num_epochs": 2, "learning_rate": 0.01, "num_threads": 1, "train_step": train_step}
    return keys | {"model": str(folder / "model"), "get_model": lambda **_: model(), "optimizer": {"class": "adamw"}} | more


def train(folder: Path, model: Any = Model, **more: Any) -> Any:
    return hvdtrain.train(keys_of(folder, model, **more))


class Watch:
    """Notes after which steps the base had changed."""

    def __init__(self) -> None:
        self.changed: list[int] = []
        self._last: torch.Tensor | None = None

    def on_step_end(self, training: Any) -> None:
        weight = training.model.base[0].weight.detach().clone()
        if self._last is not None and not torch.equal(weight, self._last):
            self.changed.append(training.step)
        self._last = weight


@pytest.mark.parametrize("accumulated", [1, 2])
def test_parameters_are_frozen_until_a_step(accumulated: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.training.vote.INTERVAL", 0.0)  # a stop comes two steps after it is asked for
    watch = Watch()
    keys = {"freeze_until_step": {"base.3.*": 0, "base.*": 5}, "accum_grad_multiple_step": accumulated, "callbacks": [watch]}
    result = train(tmp_path / "whole", **keys)
    # With accumulation, an update begins after 4 steps and another one after 6, which is the first to train it: step 8.
    assert watch.changed == ([6, 7, 8, 9, 10, 11, 12] if accumulated == 1 else [8, 10, 12])
    state = torch.load(tmp_path / "whole" / "model.002.opt.pt", weights_only=True)
    steps = {name: int(state["optimizer"]["state"][number]["step"]) for number, name in enumerate(state["param_names"][:9])}
    assert steps["base.0.weight"] == len(watch.changed)
    assert steps["base.3.weight"] == steps["new.weight"] == 12 // accumulated
    if accumulated == 1:  # stopped before and after the step
        for stop in (3, 8):

            class Stop:
                def on_step_end(self, training: Any, stop: int = stop) -> None:
                    if training.step == stop:
                        training.stop("a test")

            with pytest.raises(HvdtrainError, match="stopped by a callback"):
                train(tmp_path / f"{stop}", **keys | {"callbacks": [Stop()]})
            resumed = train(tmp_path / f"{stop}", **keys)
            assert all(torch.equal(one, result.model.state_dict()[name]) for name, one in resumed.model.state_dict().items())


def test_mistakes_about_freezing(tmp_path: Path) -> None:
    for wrong, message in (
        ({"basis.*": 3}, "freeze_until_step: expected patterns of names of trained parameters, got 'basis.*'"),
        ({"*": 3}, "freeze_until_step: expected a parameter that is trained from the beginning, got none"),
        ({"base.*": -1}, "freeze_until_step: expected numbers of steps, zero or positive"),
    ):
        with pytest.raises(ConfigError) as caught:
            train(tmp_path, freeze_until_step=wrong)
        assert message in str(caught.value)


def adapted(base_seed: int = 1) -> Model:
    model = Model(base_seed)
    model.base.requires_grad_(False)
    return model


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_files_of_trained_parameters_only(form: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "all", adapted, checkpoint_format=form)
    keys = {"checkpoint_format": form, "save_parameters": "trained", "log": [str(tmp_path / "log")]}
    only = train(tmp_path / "trained", adapted, **keys, num_epochs=1)
    told = "save_parameters: the model's file has 10 of 94 parameters; the others are of Model with 84 frozen parameters, SHA-256"
    assert told in (tmp_path / "log").read_text()
    file = only.checkpoint
    if form == "pt":
        stored = torch.load(file, weights_only=True)
        assert stored["base"]["parameters"] == 84
        buffers = {f"base.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
        assert stored["model"].keys() == {"new.weight", "new.bias"} | buffers
        optimizer = torch.load(file.with_name("model.001.opt.pt"), weights_only=True)
        assert optimizer["param_names"] == ["new.weight", "new.bias"]
    again = train(tmp_path / "trained", adapted, checkpoint_format=form, save_parameters="trained")
    assert all(torch.equal(one, whole.model.state_dict()[name]) for name, one in again.model.state_dict().items())
    loaded = hvdtrain.load_model(again.checkpoint, keys_of(tmp_path / "trained", adapted))  # without save_parameters
    assert all(torch.equal(one, whole.model.state_dict()[name]) for name, one in loaded.state_dict().items())
    with pytest.raises(HvdtrainError) as caught:
        train(tmp_path / "trained", lambda: adapted(2), checkpoint_format=form, save_parameters="trained", num_epochs=3)
    assert f"{again.checkpoint}: expected the base model that its parameters were trained with (Model with 84 " in str(
        caught.value
    )
    with pytest.raises(HvdtrainError, match="expected the base model that its parameters were trained with"):
        hvdtrain.load_model(again.checkpoint, keys_of(tmp_path / "trained", lambda: adapted(2)))


def test_a_file_with_everything_goes_on_with_less_if_the_base_is_the_same(tmp_path: Path) -> None:
    train(tmp_path, adapted, num_epochs=1)
    with pytest.raises(ConfigError, match=r"save_parameters: expected frozen parameters with the values from get_model.*base.0"):
        train(tmp_path, lambda: adapted(2), save_parameters="trained")
    result = train(tmp_path, adapted, save_parameters="trained")
    assert torch.load(result.checkpoint, weights_only=True)["model"].keys().isdisjoint({"base.0.weight"})


def test_a_base_from_another_file_is_refused_before_training(tmp_path: Path) -> None:
    train(tmp_path / "first", lambda: adapted(2), num_epochs=1)
    preload = {"base": {"filename": str(tmp_path / "first" / "model.001.pt"), "init_for_train": True}}
    with pytest.raises(ConfigError, match="init_for_train = 'always'"):
        train(tmp_path, adapted, save_parameters="trained", preload_from_files=preload)
    assert not (tmp_path / "scores.jsonl").exists()


def test_a_base_that_changes_is_not_lost_in_silence(tmp_path: Path) -> None:
    class Changes:
        def on_epoch_end(self, training: Any) -> None:
            training.model.base[3].bias.data[0] += 1  # which no version counter of PyTorch sees

    with pytest.raises(ConfigError, match=r"which 'trained' does not save, got others in base.3.bias \(load them in get_model"):
        train(tmp_path, adapted, save_parameters="trained", callbacks=[Changes()])
    assert not list(tmp_path.glob("model.*"))


def test_an_average_of_trained_parameters_has_the_hash_of_their_base(tmp_path: Path) -> None:
    keys = {"save_parameters": "trained", "average_checkpoints": {"last": 2}}
    result = train(tmp_path, adapted, num_epochs=3, **keys)
    average, models = tmp_path / "average.pt", [tmp_path / f"model.00{epoch}.pt" for epoch in (2, 3)]
    assert main([*map(str, models), "--out", str(average)]) == 0
    stored = [torch.load(file, weights_only=True) for file in (*models, average)]
    assert len({file["base"]["sha256"] for file in stored}) == 1
    mean = (stored[0]["model"]["new.weight"] + stored[1]["model"]["new.weight"]) / 2
    loaded = hvdtrain.load_model(average, keys_of(tmp_path, adapted, **keys)).state_dict()
    torch.testing.assert_close(loaded["new.weight"], mean)
    assert torch.equal(loaded["base.0.weight"], result.model.state_dict()["base.0.weight"])
    with pytest.raises(HvdtrainError, match="expected the base model that its parameters were trained with"):
        hvdtrain.load_model(average, keys_of(tmp_path, lambda: adapted(2), **keys))
    del stored[2]["base"]
    torch.save(stored[2], tmp_path / "without.pt")
    with pytest.raises(HvdtrainError, match=r"expected all parameters, or the hash of a base model, got neither again\.bias, "):
        hvdtrain.load_model(tmp_path / "without.pt", keys_of(tmp_path, adapted, **keys))
    train(tmp_path / "other", lambda: adapted(2), num_epochs=1, save_parameters="trained")
    assert main([str(models[0]), str(tmp_path / "other" / "model.001.pt"), "--out", str(tmp_path / "mixed.pt")]) == 2
