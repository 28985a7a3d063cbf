"""The operations of a step, as they follow from the sizes of layers; and the line of --summary."""

import json
import re
from pathlib import Path

import pytest
import torch
from inside import run_inside
from launching import TOY

from hvdtrain.plugins.inspect.torch_cost import measured_cost, measured_peak

T, B, I, H = 7, 5, 6, 8  # noqa: E741
CPU = torch.device("cpu")

LAYERS = {
    "linear": (torch.nn.Linear(I, H), I * H),
    "lstm": (torch.nn.LSTM(I, H), 4 * H * (I + H)),
    "bidirectional": (torch.nn.LSTM(I, H, bidirectional=True), 2 * 4 * H * (I + H)),
    "gru": (torch.nn.GRU(I, H), 3 * H * (I + H)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_operations_are_those_of_the_layers(name: str) -> None:
    """A multiplication and an addition per weight and frame, and twice as many for the gradients of inputs and weights."""
    layer, weights = LAYERS[name]
    inputs = torch.randn(T, B, I, requires_grad=True)

    def step() -> None:
        outputs = layer(inputs)
        (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).sum().backward()

    cost = measured_cost(step, CPU, torch.float32)
    # A GRU is multiplied frame by frame: the gradient of the first, constant state is not computed.
    assert cost.flops == pytest.approx(3 * 2 * T * B * weights, rel=0.1 if name == "gru" else 0)
    assert cost.share == cost.flops / cost.seconds / cost.peak


def test_the_peak_is_one_that_a_processor_can_have() -> None:
    assert 1e8 < measured_peak(CPU, torch.float32) < 1e14


def test_a_training_reports_the_operations_of_its_epochs(corpus: Path, tmp_path: Path) -> None:
    """The same scores as without; the toy model multiplies every frame by the same weights, so that the estimate is exact."""
    found = []
    for name, more in (("with", {"count_flops": True}), ("without", {})):
        given = {"corpus": corpus, "model": tmp_path / name / "model", "num_epochs": 2, **more}
        finished = run_inside([TOY, *(word for key, value in given.items() for word in (f"++{key}", value))])
        assert finished.status == 0, finished.err
        found.append([json.loads(line) for line in (tmp_path / name / "scores.jsonl").read_text().splitlines()])
        assert ("epoch 1, operations: " in finished.out) == bool(more), finished.out
    assert [line["scores"] for line in found[0]] == [line["scores"] for line in found[1]]
    assert not any("flops" in line for line in found[1])
    flops = [line["flops"] for line in found[0]]
    assert [one["epoch"] / one["step"] for one in flops] == [pytest.approx(line["steps"]) for line in found[0]]
    assert all(0 < one["share"] < 1 for one in flops)


def test_the_summary_says_what_a_step_costs(corpus: Path, tmp_path: Path) -> None:
    finished = run_inside([TOY, "--summary", "++corpus", corpus, "++model", tmp_path / "exp" / "model"])
    assert finished.status == 0, finished.err
    line = (
        r"^training step of \d+ sequences: \S+ GFLOP forward and backward in \d\.\d{3} s, which is \d+% of the \S+ GFLOP/s that "
    )
    assert re.search(line, finished.out, re.MULTILINE), finished.out
    assert not (tmp_path / "exp").exists()
