"""Models in the format safetensors: other programs read them, and training continues from them as from any other file."""

import importlib.util
import json
import resource
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import TOY
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.learner.frameworks import BuildOptions
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.learner.torch.learner import build_learner
from hvdtrain.learner.torch.model_file import read_file, write_model
from hvdtrain.learner.torch.step import TorchLearner
from hvdtrain.run import train
from hvdtrain.runtime.timer import Timer
from hvdtrain.settings import Settings, read_settings

CPU = torch.device("cpu")


class Tied(torch.nn.Module):
    """An output layer with the weights of the embedding, and a matrix that is stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.output = torch.nn.Linear(3, 5)
        self.output.weight = self.embedding.weight
        self.transposed = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("empty", torch.zeros(0, 2))


class WithExtraState(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def learner(get_model: Callable[[], torch.nn.Module] = Tied, model_format: str = "safetensors", **keys: Any) -> TorchLearner:
    made = LearnerKeys(get_model=lambda **_: get_model(), train_step=print, optimizer={"class": "adam"}, **keys)
    gradients = GradientExchange(SingleCommunicator(), Timer())
    return build_learner(made, gradients, BuildOptions(rank=0, local_rank=0, threads=1, seed=1, model_format=model_format))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("ema_decay", [None, 0.9])
@pytest.mark.parametrize("in_background", [False, True])
def test_shared_tensors_are_stored_once_and_come_back_under_all_names(
    tmp_path: Path, ema_decay: float | None, in_background: bool
) -> None:
    made = learner(ema_decay=ema_decay)
    made.begin_epoch(1, 0)
    file = tmp_path / "model.safetensors"
    progress = {"step": 3, "epoch": 1, "history": [{"score": float("nan")}]}
    contents = made.state.contents(progress)
    (made.state.copied(contents) if in_background else contents).write(file, tmp_path / "model.opt.pt")
    made.state.close()
    with safe_open(file, framework="numpy") as stored:
        assert sorted(stored.keys()) == ["count", "embedding.weight", "empty", "output.bias", "transposed"]
        metadata = stored.metadata()
    assert metadata.keys() == {"format", "hvdtrain", "hvdtrain_checksum", "output.weight"}
    assert (metadata["format"], metadata["output.weight"]) == ("pt", "embedding.weight")
    assert json.loads(metadata["hvdtrain"])["step"] == 3
    again = learner(ema_decay=ema_decay)
    with torch.no_grad():
        again.model.transposed.zero_()
    assert again.state.load(file, tmp_path / "model.opt.pt")["epoch"] == 1
    assert same(again.model.state_dict(), made.model.state_dict())
    plain = Tied()
    load_model(plain, file)  # Hugging Face's own, as any program may call it
    assert same(plain.state_dict(), made.model.state_dict())


def test_tensors_that_overlap_are_stored_each(tmp_path: Path) -> None:
    whole = torch.arange(4.0)
    tensors = {"whole": whole, "tail": whole[2:], "again": whole[2:]}
    write_model(tmp_path / "model.safetensors", tensors, {"step": 1}, "safetensors")
    found = read_file(tmp_path / "model.safetensors", CPU)
    assert found["step"] == 1
    assert same(found["model"], tensors)


def test_a_file_that_cannot_be_written_or_read_says_so(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_model(file, {"weight": torch.zeros(1_000_000)}, {}, "safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    write_model(file, {"weight": torch.zeros(1000)}, {}, "safetensors")
    (tmp_path / "usual").touch()
    assert file.stat().st_mode == (tmp_path / "usual").stat().st_mode
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model.safetensors: expected the file as it was written, got other bytes"):
        read_file(file, CPU)
    with pytest.raises(CheckpointError, match=r"none.safetensors: expected a checkpoint's file, got: no such file"):
        read_file(tmp_path / "none.safetensors", CPU)


def test_what_is_no_tensor_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match=r"expected 'pt' for a model .* dense tensors, got 'safetensors' with _extra_state"):
        learner(lambda: WithExtraState(2, 2))
    learner(lambda: WithExtraState(2, 2), "pt")


@pytest.mark.parametrize("value", [Fraction(1, 3), lambda: 0])
def test_a_model_whose_checkpoint_could_not_be_loaded_is_refused_before_training(value: object) -> None:
    class WithObject(WithExtraState):
        def get_extra_state(self) -> Any:
            return value

    with pytest.raises(
        ConfigError, match=r"get_model: expected a model whose state_dict .* got _extra_state of type (fractions|builtins)"
    ):
        learner(lambda: WithObject(2, 2), "pt")


def settings_of(corpus: Path, model: Path, **overrides: object) -> Settings:
    texts = {"corpus": corpus, "part": "two.hdf", "max_seqs": 1, "model": model / "model", "optimizer": "adam", **overrides}
    return read_settings([TOY], {name: str(value) for name, value in texts.items()})


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("model.*") if path.suffix != ".lock")


def test_training_goes_on_from_the_newest_model_in_any_format(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(settings_of(corpus, tmp_path / "whole", num_epochs=3))
    mixed = tmp_path / "mixed"
    for epochs, name in ((1, "pt"), (2, "safetensors"), (3, "pt")):
        train(settings_of(corpus, mixed, num_epochs=epochs, checkpoint_format=name))
    assert "model.001.pt: training continues after epoch 1" in (told := capsys.readouterr().out)
    assert "model.002.safetensors: training continues after epoch 2" in told
    assert files(mixed) == ["model.001.pt", "model.002.opt.pt", "model.002.safetensors", "model.003.opt.pt", "model.003.pt"]
    ends = [torch.load(tmp_path / name / "model.003.pt", weights_only=True)["model"] for name in ("whole", "mixed")]
    assert same(*ends)
    second = torch.load(tmp_path / "whole" / "model.002.pt", weights_only=True)["model"]
    assert same(load_file(mixed / "model.002.safetensors"), second)

    # From another training: `load` without a suffix, parameters of a file, and of one that another program wrote.
    for name in ("whole", "mixed"):
        train(settings_of(corpus, tmp_path / f"after {name}", load=tmp_path / name / "model.002", num_epochs=3))
    assert "model.002.safetensors: training continues after epoch 2, step 4." in capsys.readouterr().out
    ends = [torch.load(tmp_path / f"after {name}" / "model.003.pt", weights_only=True)["model"] for name in ("whole", "mixed")]
    assert same(*ends)
    save_file({"weight": second["first.weight"] + 1}, tmp_path / "part.safetensors")
    part = {"filename": str(tmp_path / "part.safetensors"), "prefix": "first.", "ignore_missing": True, "init_for_train": True}
    all_of_it = {"filename": str(mixed / "model.002.safetensors"), "init_for_train": True}
    preload = {"a_part": part, "b_all": all_of_it}
    train(settings_of(corpus, tmp_path / "preloaded", preload_from_files=preload, learning_rate=0, num_epochs=1))
    found = torch.load(tmp_path / "preloaded" / "model.001.pt", weights_only=True)["model"]
    assert same(found, {**second, "first.weight": second["first.weight"] + 1})

    # Anew over what is there: of two formats, one model is left; and what is removed has any of them.
    train(settings_of(corpus, mixed, num_epochs=1, checkpoint_format="safetensors", start_epoch=1))
    assert [name for name in files(mixed) if ".001" in name] == ["model.001.opt.pt", "model.001.safetensors"]
    cleanup = {"keep_last_n": 1, "keep_best_n": 0, "keep": []}
    train(settings_of(corpus, mixed, num_epochs=4, cleanup_old_models=cleanup, checkpoint_format="safetensors"))
    assert [name for name in files(mixed) if "abandoned" not in name] == ["model.004.opt.pt", "model.004.safetensors"]


def test_a_model_in_two_formats_is_one_checkpoint(tmp_path: Path) -> None:
    """As after a conversion by hand."""
    for name in ("net.001.pt", "net.001.safetensors", "net.001.opt.pt", "net.002.step-9.safetensors"):
        (tmp_path / name).touch()
    folder = CheckpointFolder(tmp_path / "net", "pt", "safetensors")
    assert folder.finished_epochs() == [1]
    assert folder.newest() == folder.checkpoint_at(1)
    assert folder.checkpoint_at(1).model_file.name == "net.001.safetensors"
    assert CheckpointFolder(tmp_path / "net").checkpoint_at(1).model_file.name == "net.001.pt"
    assert CheckpointFolder(tmp_path / "net").checkpoint_at(2, 9).model_file.name == "net.002.step-9.safetensors"
    assert folder.checkpoint_at(3).model_file.name == "net.003.safetensors"
    left_behind = tmp_path / "net.003.safetensors.folder.unfinished"  # by a kill
    left_behind.mkdir()
    (left_behind / ".tmpX").touch()
    folder.prepare(folder.new(3))
    assert not left_behind.exists()
    folder.remove([folder.checkpoint_at(1)])
    folder.tidy(folder.checkpoint_at(3))
    assert list(tmp_path.iterdir()) == []


def test_what_a_config_may_ask_for(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint_format: expected 'pt' or 'safetensors' with backend 'torch', got 'npz'"):
        settings_of(corpus, tmp_path, checkpoint_format="npz")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "hvdtrain.learner.model_format.find_spec", lambda name: None if name == "safetensors" else find_spec(name)
    )
    told = r": expected the package safetensors, got none \(pip install safetensors\)"
    with pytest.raises(ConfigError, match="checkpoint_format" + told):
        settings_of(corpus, tmp_path, checkpoint_format="safetensors")
    with pytest.raises(ConfigError, match="load" + told):
        settings_of(corpus, tmp_path, load="theirs.safetensors")
    with pytest.raises(ConfigError, match="preload_from_files.x" + told):
        settings_of(corpus, tmp_path, preload_from_files={"x": {"filename": "theirs.safetensors"}})
    settings_of(corpus, tmp_path)
