"""`hvdtrain export`: a trained model for use without hvdtrain."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy
import onnx.reference
import pytest
import torch
from inside import run_inside
from launching import TOY, Finished, hvdtrain, launch
from trainings import CONFIGS, Run, Trained, trains

TENSORFLOW = Run("tensorflow", "single", 1)

PARTS = """
_train_step = train_step


def train_step(*, model, extern_data, **_):
    _train_step(model=model.forward, extern_data=extern_data)
"""

LOADS = """
import sys
from pathlib import Path

from hvdtrain.cli import main

assert main(sys.argv[1:]) == 0

import numpy
import tensorflow as tf

folder = Path(sys.argv[-1]).parent / "export-001"
model = tf.saved_model.load(str(folder / "saved_model"))
weights = numpy.load(folder / "weights.npz")
frames = numpy.random.default_rng(1).normal(size=(3, 17, 4)).astype(numpy.float32)
hidden = numpy.pad(frames, ((0, 0), (1, 1), (0, 0)))
hidden = sum(hidden[:, shift : shift + 17] @ weights["first.kernel"][shift] for shift in range(3)) + weights["first.bias"]
scores = numpy.maximum(hidden, 0) @ weights["last.kernel"] + weights["last.bias"]
numpy.testing.assert_allclose(model.serve(tf.constant(frames)).numpy(), scores, rtol=1e-3, atol=1e-5)
print("the same")
"""


@pytest.fixture(scope="module")
def exportable(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs, of which the first is the best, as it is said to be better if the loss is higher."""
    folder = tmp_path_factory.mktemp("trained")
    given = {"corpus": corpus, "model": folder / "model", "evaluated": True, "num_epochs": 2}
    ended = hvdtrain(TOY, given | {"learning_rate": 0.001, "higher_is_better": ["ce"]})
    assert ended.status == 0, ended.err
    return folder


def export(config: Path, corpus: Path, folder: Path, *options: object) -> Finished:
    return run_inside(["export", config, *options, "++corpus", corpus, "++model", folder / "model", "++evaluated", "True"])


def test_a_pytorch_model_in_every_form(corpus: Path, exportable: Path) -> None:
    ended = export(TOY, corpus, exportable, "--epoch", "best")
    assert ended.status == 0, ended.err
    folder = exportable / "export-001"
    assert f"{folder / 'model.pt2'}\n" in ended.out, ended.out
    weights = torch.load(folder / "state_dict.pt", weights_only=True)
    stored = torch.load(exportable / "model.001.pt", weights_only=True)["model"]
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], stored[name]) for name in stored)

    frames = torch.randn(3, 17, 4)
    hidden = torch.nn.functional.conv1d(frames.transpose(1, 2), weights["first.weight"], weights["first.bias"], padding=1)
    expected = hidden.transpose(1, 2).relu() @ weights["last.weight"].T + weights["last.bias"]
    mask = torch.ones(3, 17, dtype=torch.bool)
    program = torch.export.load(folder / "model.pt2").module()
    torch.testing.assert_close(program(frames, mask), expected)

    session = onnx.reference.ReferenceEvaluator(str(folder / "model.onnx"))
    given: dict[str, Any] = dict(zip(session.input_names, (frames.numpy(), mask.numpy()), strict=False))
    numpy.testing.assert_allclose(session.run(None, given)[0], expected.numpy(), rtol=1e-4, atol=1e-5)
    told = (folder / "README.md").read_text()
    assert 'model.load_state_dict(torch.load("state_dict.pt", weights_only=True))' in told
    assert 'model = torch.export.load("model.pt2").module()\nmodel(<torch.float32, such as [' in told


def test_what_cannot_be_exported_is_told(corpus: Path, exportable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.py"
    config.write_text(TOY.read_text() + PARTS)
    ended = export(config, corpus, exportable, "--out", tmp_path / "out")
    assert ended.status == 0, ended.err
    assert "model.pt2: not written: train_step does not call the model itself, model(...), but parts of it" in ended.out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "state_dict.pt"]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ended = export(TOY, corpus, exportable, "--out", tmp_path / "out")
    told = "model.onnx: not written: it needs onnx and onnxscript (pip install hvdtrain[export])"
    assert told in ended.out
    assert (tmp_path / "out" / "model.pt2").exists()

    ended = export(TOY, corpus, tmp_path)
    assert ended.status == 2
    assert "load: expected a trained model, got no file such as" in ended.err
    (tmp_path / "file").touch()
    ended = export(TOY, corpus, exportable, "--out", tmp_path / "file")
    assert ended.status == 2
    assert "file: expected a folder that can be written to, got: " in ended.err


@trains(TENSORFLOW)
def keras_training(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return {"exported": {}}


def test_a_keras_model(corpus: Path, trained: Trained) -> None:
    """Exported, and loaded in the same process, which is a new one."""
    model = trained(keras_training, TENSORFLOW).models["exported"]
    arguments = ["export", CONFIGS["tensorflow"], "++corpus", corpus, "++model", model]
    ended = launch(["-c", LOADS, *arguments])
    folder = model.parent / "export-001"
    assert ended.status == 0, ended.err
    assert f"{folder / 'saved_model'}\n" in ended.out
    assert ended.out.endswith("the same\n")
    assert "model.serve(<float32, (None, None, 4)>)" in (folder / "README.md").read_text()
