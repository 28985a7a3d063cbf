"""torch.compile: the same losses, the same names, gradients that still leave while backward runs, and no end of graphs."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from launching import TOY, hvdtrain, refused
from learners import batch_of, learner_of
from trainings import Run, Trained, assert_same, trains

from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.context import get_run_ctx
from hvdtrain.data.types import Batch
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.runtime.timer import Timer
from hvdtrain.settings import read_settings


class Block(torch.nn.Module):
    """512 * 512 weights: half a message."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(512, 512)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        return frames + self.linear(frames).tanh()


class Model(torch.nn.Module):
    """Notes when backward has come to the end of its first block."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.events = events

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            frames = block(frames)
            if not number and frames.requires_grad and not torch.compiler.is_compiling():
                frames.register_hook(lambda _: self.events.append("backward at the first block"))
        return frames


class NotingExchange(GradientExchange):
    """Notes when gradients leave, as if for other ranks."""

    is_shared = True

    def __init__(self, events: list[str]) -> None:
        super().__init__(SingleCommunicator(), Timer())
        self.is_sent = True
        self.events = events

    def start(self, gradients: list[Any], *, name: str, owners: Sequence[int] | None = None) -> Any:
        self.events.append(name)
        return super().start(gradients, name=name, owners=owners)


def squares(*, model: torch.nn.Module, extern_data: dict[str, Any], **_: Any) -> None:
    data = extern_data["data"]
    get_run_ctx().mark_as_loss(model(data.raw_tensor)[data.mask].square().mean(-1), "square")


def learner(events: list[str], torch_compile: Any, train_step: Callable[..., None] = squares) -> Any:
    def get_model(**_: Any) -> torch.nn.Module:
        torch.manual_seed(1)
        return Model(events)

    return learner_of(get_model, train_step, gradients=NotingExchange(events), torch_compile=torch_compile)


def batch(size: int, length: int) -> Batch:
    frames = numpy.random.default_rng(size * 100 + length).normal(size=(size, length, 512)).astype(numpy.float32)
    return batch_of(frames)


class Lines(logging.Handler):
    """What hvdtrain says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


SHAPES = ((3, 4), (5, 7), (6, 3), (1, 5), (3, 1), (4, 11), (7, 13), (2, 2), (9, 6))


@pytest.mark.parametrize(
    ("backend", "is_whole"),
    [
        ("aot_eager", False),
        pytest.param("aot_eager", True, marks=pytest.mark.slow),
        pytest.param("inductor", False, marks=pytest.mark.slow),
    ],
)
def test_blocks_that_are_compiled_one_by_one_send_gradients_while_backward_runs(
    backend: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With graphs as PyTorch captures them, also of the whole model; and with the default, which compiles C++ for a while."""
    if backend == "inductor":  # without threads that stay, and what it adds to the environment
        monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
        monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")
    said = Lines()
    logger = logging.getLogger("hvdtrain")
    before = logger.level
    logger.setLevel(1)
    logger.addHandler(said)
    try:
        wanted = {"backend": backend} | ({} if is_whole else {"modules": ["Block"]})
        plain, compiled = learner([], False), learner([], wanted)
        assert plain.model.state_dict().keys() == compiled.model.state_dict().keys()
        assert type(compiled.model) is Model
        told = []
        for size, length in SHAPES if backend == "aot_eager" else 2 * SHAPES[:1]:  # each graph more takes seconds
            losses = []
            for made in (plain, compiled):
                made.backward(batch(size, length))
                made.update(1e-3)
                losses.append(made.meter.take_scores().means()["square"])
            assert losses[1] == pytest.approx(losses[0], rel=1e-4)
            told.append(sum(line.startswith("torch.compile: ") for line in said.lines))
            said.lines.clear()
    finally:
        logger.removeHandler(said)
        logger.setLevel(before)
    assert told[0] == 1
    assert not any(told[5:])  # after batches of one sequence and of one frame nothing is compiled any more
    for made in (plain,) if is_whole else (plain, compiled):
        steps = " ".join(made.model.events).split("backward at the first block")
        # The later blocks are 2 MB; the first one comes with "gradients.1". In the first step, all gradients leave afterwards.
        assert [names.split() for names in steps[:2]] == [[], ["gradients.0", "gradients.1", "gradients.0"]]
    for one, other in zip(plain.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_several_means_are_not_accumulated_with_it() -> None:
    """A backward that PyTorch compiled overwrites what a second one would need."""

    def two_means(*, model: torch.nn.Module, extern_data: dict[str, Any], **_: Any) -> None:
        data = extern_data["data"]
        scores = model(data.raw_tensor)[data.mask]
        get_run_ctx().mark_as_loss(scores.square().mean(-1), "first", use_normalized_loss=True)
        get_run_ctx().mark_as_loss(scores[:3, 0], "second", use_normalized_loss=True)

    made = learner([], {"backend": "aot_eager"}, two_means)
    with refused("torch_compile: wrong-result"):
        made.backward(batch(3, 4), completes_update=False)


def test_mistakes_are_told_before_training() -> None:
    with refused("torch_compile.dynamik: unknown-key"):
        learner([], {"dynamik": True})
    with refused("torch_compile.modules: unknown-value"):
        learner([], {"modules": ["Blok"]})
    with refused("torch_compile: unknown-key"):
        learner([], {"backend": "no_such"})


RUN = Run("torch", "horovod", 2)


@trains(slow=[RUN])
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """Graphs as PyTorch captures them, without the C++ compiler's half a minute, which the test above has."""
    keys = {"losses": "mean", "evaluated": True, "num_epochs": 2, "parts": 4}
    return {"plain": keys, "compiled": {**keys, "torch_compile": {"backend": "aot_eager"}, "log": folder / "compiled.log"}}


@pytest.mark.slow
def test_a_compiled_training_has_the_losses_of_a_plain_one(trained: Trained) -> None:
    made = trained(trainings, RUN)
    for one, other in zip(made.scores("plain"), made.scores("compiled"), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    files = [made.models[name].with_name("model.002.pt") for name in ("plain", "compiled")]
    models = [torch.load(file, weights_only=True)["model"] for file in files]
    assert models[0].keys() == models[1].keys()
    for rank in range(RUN.size):
        log = made.needed(f"compiled.horovod-{rank}-{RUN.size}.log")
        assert "torch.compile: " in log.read_text()
        assert_same(made.weights("compiled"), made.weights("compiled", rank))


@pytest.mark.slow
def test_a_missing_compiler_is_told_in_a_line(corpus: Path, tmp_path: Path) -> None:
    keys: dict[str, object] = {"corpus": corpus, "model": tmp_path / "model", "torch_compile": True}
    environment = {"CXX": "/nowhere/c++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    finished = hvdtrain(TOY, keys, environment=environment, timeout=200)
    assert finished.status == 2
    assert "torch_compile: expected PyTorch to compile the model, got: InvalidCxxCompiler: No working C++" in finished.err
    assert "Traceback" not in finished.err


def test_a_compiler_that_fails_without_a_word_is_named_with_the_place(corpus: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    broken = "\n\ndef broken(*_):\n    assert 0 > 1\n\n\ntorch_compile = {'backend': broken}\n"
    config.write_text(TOY.read_text() + broken)
    finished = hvdtrain(config, {"corpus": corpus, "model": tmp_path / "model"})
    assert finished.status == 2
    assert f"expected PyTorch to compile the model, got: AssertionError in {config}, line " in finished.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sync_batch_norm = True", "torch_compile: conflict"),
        ("backend = 'tensorflow'", "torch_compile: needs-backend"),
    ],
)
def test_what_does_not_go_with_it(tmp_path: Path, line: str, message: str) -> None:
    config = tmp_path / "config.py"
    config.write_text(f"""
model, train, max_seqs, learning_rate, torch_compile = "model", "train.hdf", 4, 0.1, True
{line}
def get_model(**_): ...
def train_step(**_): ...
""")
    with refused(message):
        read_settings([config], {})
