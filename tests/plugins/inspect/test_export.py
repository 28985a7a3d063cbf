"""`hvdtrain export`: a trained model for use without hvdtrain."""

import importlib.util
import logging
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import numpy
import onnx.reference
import pytest
import torch
from inside import run_inside
from launching import TOY, Finished, hvdtrain, launch
from torch import nn
from trainings import CONFIGS, Run, Trained, trains

from hvdtrain.plugins.inspect.torch_models import export_model

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
    sizes = "frames float32 (A, B, 4), mask bool (C, D) with A, B, C, D of any size; fixed: axis 2 of frames at 4"
    assert f"{folder / 'model.pt2'} takes {sizes}\n" in ended.out, ended.out
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
    assert f'model = torch.export.load("model.pt2").module()\noutputs = model(frames, mask)\n```\n\nIt takes {sizes}.\n' in told
    assert 'outputs = session.run(None, {"frames": frames, "mask": mask})' in told


def test_formats_that_cannot_be_exported_are_reported(
    corpus: Path, exportable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.py"
    config.write_text(TOY.read_text() + PARTS)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.onnx").write_text("of an earlier export")
    ended = export(config, corpus, exportable, "--out", tmp_path / "out")
    assert ended.status == 0, ended.err
    assert "model.pt2: not written: train_step does not call the model itself, model(...), but parts of it" in ended.out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "state_dict.pt"]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ended = export(TOY, corpus, exportable, "--out", tmp_path / "out")
    told = "model.onnx: not written: it needs onnx and onnxscript (pip install onnx onnxscript)"
    assert told in ended.out
    assert (tmp_path / "out" / "model.pt2").exists()

    ended = run_inside([TOY, "++task", "export", "++corpus", corpus])
    assert "(export is a command: python -m hvdtrain export CONFIG), got 'export' in the command line" in ended.err

    ended = export(TOY, corpus, tmp_path)
    assert ended.status == 2
    assert "load: expected a trained model, got no file such as" in ended.err
    (tmp_path / "file").touch()
    ended = export(TOY, corpus, exportable, "--out", tmp_path / "file")
    assert ended.status == 2
    assert "file: expected a folder that can be written to, got: " in ended.err


class Recurrent(nn.Module):
    """Layers of all kinds, one after the other, and a reshape between them that depends on the strides of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 6, bidirectional=True, batch_first=True)
        self.lstm = nn.LSTM(12, 5, num_layers=2, dropout=0.1)
        self.both_ways = nn.LSTM(5, 3, bidirectional=True, batch_first=True)
        self.deep = nn.GRU(6, 2, num_layers=2, bias=False)

    def forward(self, frames: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        hidden = self.gru(frames, state)[0]
        hidden = hidden.reshape(-1, 12).tanh().reshape(hidden.shape)
        hidden, (_, cell) = self.lstm(hidden.transpose(0, 1))
        hidden = self.both_ways(hidden.transpose(0, 1))[0]
        return *self.deep(hidden.transpose(0, 1)), cell


@pytest.mark.slow
def test_recurrent_layers_take_any_length(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Recurrent()
    written = export_model(model, lambda: model(torch.randn(3, 7, 4)), tmp_path)
    takes = "frames float32 (A, B, 4) with A, B of any size; fixed: axis 2 of frames at 4"
    assert [(one.problem, one.takes) for one in written] == [(None, ""), (None, takes), (None, takes)]
    program = torch.export.load(tmp_path / "model.pt2").module()
    session = onnx.reference.ReferenceEvaluator(str(tmp_path / "model.onnx"))
    [axes] = [value.type.tensor_type.shape.dim for value in session.proto_.graph.input]
    assert [bool(axis.dim_param) for axis in axes] == [True, True, False]
    for batch, length in ((3, 7), (1, 1), (5, 12)):
        frames = torch.randn(batch, length, 4)
        with torch.no_grad():
            expected = model(frames)
            torch.testing.assert_close(tuple(program(frames)), expected)
        for one, wanted in zip(session.run(None, {"frames": frames.numpy()}), expected, strict=True):
            numpy.testing.assert_allclose(one, wanted.numpy(), rtol=1e-4, atol=1e-5)
    assert {kernel.__name__ for kernel in torch.ops.aten.gru.input.py_kernels.values()} == {"gru_impl"}  # as before


@pytest.mark.slow
def test_a_recurrent_layer_that_goes_on_from_a_state(tmp_path: Path) -> None:
    model = Recurrent()
    written = export_model(model, lambda: model(torch.randn(3, 7, 4), state=torch.randn(2, 3, 6)), tmp_path)
    assert "outputs = model(frames, state=state)" in written[1].how_to_load
    assert written[1].takes.startswith("frames float32 (A, B, 4), state float32 (2, A, 6) with A, B of any size; fixed: ")
    frames, state = torch.randn(5, 2, 4), torch.randn(2, 5, 6)
    program = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        torch.testing.assert_close(tuple(program(frames, state=state)), model(frames, state))


class Halved(nn.Module):
    """Joins two frames each, so that it takes even lengths only."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        torch._check(batch["frames"].shape[1] % 2 == 0)
        return batch["frames"][:, ::2] + batch["frames"][:, 1::2]


@pytest.mark.slow
def test_conditions_on_sizes_are_reported(tmp_path: Path) -> None:
    model = Halved()
    written = export_model(model, lambda: model({"frames": torch.randn(3, 8, 4)}), tmp_path)
    assert written[1].takes.startswith("batch_frames float32 (A, B, C) with A, B, C of any size; ")
    assert "; conditions: " in written[1].takes
    assert "(B % 2) == 0" in written[1].takes
    program = torch.export.load(tmp_path / "model.pt2").module()
    frames = torch.randn(2, 6, 4)
    torch.testing.assert_close(program({"frames": frames}), model({"frames": frames}))
    with pytest.raises(AssertionError, match="Guard failed"):
        program({"frames": frames[:, :5]})


@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        (nn.RNN(4, 3), "PyTorch translates GRU and LSTM to ONNX, but not torch.nn.RNN"),
        (nn.RNN(4, 3, nonlinearity="relu"), "PyTorch translates GRU and LSTM to ONNX, but not torch.nn.RNN"),
        (nn.LSTM(4, 3, proj_size=2), "ONNX has no LSTM with projections (proj_size)"),
    ],
)
def test_recurrent_layers_that_onnx_does_not_have(layer: nn.Module, problem: str, tmp_path: Path) -> None:
    written = export_model(layer, lambda: layer(torch.randn(7, 3, 4)), tmp_path)
    assert (written[1].problem, written[2].problem) == (None, problem)
    frames = torch.randn(2, 5, 4)
    with torch.no_grad():
        expected = layer(frames)[0]
        torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(frames)[0], expected)


class Places(nn.Module):
    """Knows 50 places, and, with an offset, the length of its batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(50, 4))
        self.offset = nn.Parameter(torch.randn(7, 4))

    def forward(self, frames: torch.Tensor, offset: bool = False, threshold: float | None = None) -> torch.Tensor:
        if threshold is not None and frames.sum() > threshold:
            return frames
        return frames + (self.offset if offset else self.places[: frames.shape[1]])


@pytest.mark.slow
def test_sizes_that_are_fixed_or_limited_are_reported(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    model = Places()
    frames = torch.randn(3, 7, 4)
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("torch").addHandler(handler)
    try:
        limited = export_model(model, lambda: model(frames), tmp_path)
        fixed = export_model(model, lambda: model(frames, offset=True), tmp_path)
        with redirect_stderr(StringIO()) as printed:
            failed = export_model(model, lambda: model(frames, threshold=1.0), tmp_path)
    finally:
        logging.getLogger("torch").removeHandler(handler)
    assert {one.takes for one in limited[1:]} == {
        "frames float32 (A, B, 4) with A of any size, B up to 50; fixed: axis 2 of frames at 4"
    }
    assert {one.takes for one in fixed[1:]} == {
        "frames float32 (A, 7, 4) with A of any size; fixed: axis 1 of frames at 7, axis 2 of frames at 4"
    }
    assert failed[1].problem is not None
    assert failed[1].problem.startswith("GuardOnDataDependentSymNode: Could not guard on data-dependent expression ")
    assert failed[1].problem.endswith(": if threshold is not None and frames.sum() > threshold:)")
    assert (records, printed.getvalue(), recwarn.list) == ([], "", [])  # PyTorch keeps its own remarks to itself


@trains(slow=[TENSORFLOW])
def keras_training(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return {"exported": {}}


@pytest.mark.slow
def test_a_keras_model(corpus: Path, trained: Trained) -> None:
    """Exported, and loaded in the same process, which is a new one."""
    model = trained(keras_training, TENSORFLOW).models["exported"]
    arguments = ["export", CONFIGS["tensorflow"], "++corpus", corpus, "++model", model]
    ended = launch(["-c", LOADS, *arguments])
    folder = model.parent / "export-001"
    assert ended.status == 0, ended.err
    assert f"{folder / 'saved_model'} takes frames float32 (any, any, 4); fixed: axis 2 of frames at 4\n" in ended.out
    assert ended.out.endswith("the same\n")
    assert "outputs = model.serve(frames)" in (folder / "README.md").read_text()
