"""Histograms of the parameters for TensorBoard."""

from pathlib import Path

import numpy
import pytest
from launching import faults
from tensorboard.data_compat import migrate_value
from tensorboard_events import events
from trainings import Run, Trained, marked, trains

from hvdtrain.plugins.trackers.keys import TrackerKeys
from hvdtrain.plugins.trackers.receivers import histogram


def histograms(folder: Path) -> list[dict[str, object]]:
    """By tag, the histograms of every event in a folder that has some."""
    found = [{value.tag: value for value in event.summary.value if value.HasField("histo")} for event in events(folder)]
    return [one for one in found if one]


def test_a_histogram_has_every_finite_element() -> None:
    values = numpy.random.default_rng(1).normal(size=(30, 40)).astype(numpy.float32)
    values[0, 0], values[1, 1] = numpy.nan, numpy.inf
    found = histogram(values)
    assert found is not None
    finite = values[numpy.isfinite(values)].astype(numpy.float64)
    assert found["num"] == sum(found["bucket"]) == 1198
    assert found["sum"] == pytest.approx(finite.sum())
    assert found["sum_squares"] == pytest.approx((finite**2).sum())
    below = numpy.searchsorted(numpy.sort(finite), found["bucket_limit"][:-1])
    assert numpy.cumsum(found["bucket"])[:-1].tolist() == below.tolist()
    assert histogram(numpy.full(3, numpy.nan)) is None
    flat = histogram(numpy.zeros(5))
    assert flat is not None
    assert (flat["num"], flat["min"], flat["max"]) == (5, 0.0, 0.0)


def test_they_belong_to_tensorboard() -> None:
    assert faults(TrackerKeys(tensorboard_histograms=True).problems()) == ["tensorboard_histograms: missing"]
    assert faults(TrackerKeys(tensorboard_histograms=True, use_tensorboard=True).problems()) == []


TORCH, TENSORFLOW = (Run(framework, "horovod", 2) for framework in ("torch", "tensorflow"))


@trains(TORCH, slow=[TENSORFLOW])
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return {"histograms": {"num_epochs": 2, "use_tensorboard": True, "tensorboard_histograms": True}}


@pytest.mark.parametrize("run", [TORCH, *marked([TENSORFLOW], pytest.mark.slow)], ids=str)
def test_on_two_ranks(trained: Trained, run: Run) -> None:
    made, framework = trained(trainings, run), run.framework
    tmp_path = made.models["histograms"].parent
    epochs = histograms(tmp_path / "tensorboard")
    assert len(epochs) == 2
    sizes = {tag.removeprefix("parameters/"): value.histo.num for tag, value in epochs[-1].items()}  # type: ignore[attr-defined]
    if framework == "torch":
        assert sizes == {
            "unused": 3,
            "frozen": 3,
            "first.weight": 96,
            "first.bias": 8,
            "last.weight": 40,
            "last.bias": 5,
        }
        import torch

        weights = torch.load(tmp_path / "model.002.pt", weights_only=True)["model"]["first.weight"].numpy()
        histo = epochs[-1]["parameters/first.weight"].histo  # type: ignore[attr-defined]
        assert histo.sum == pytest.approx(weights.sum(dtype=numpy.float64))
        assert (histo.min, histo.max) == (weights.min(), weights.max())
    else:
        assert sorted(sizes.values()) == [3, 3, 3, 5, 8, 40, 96]
    changed = [epoch["parameters/" + next(name for name in sizes if sizes[name] == 96)] for epoch in epochs]
    assert changed[0].histo.sum != changed[1].histo.sum  # type: ignore[attr-defined]
    taken = migrate_value(changed[0])
    assert taken.metadata.plugin_data.plugin_name == "histograms", "TensorBoard takes it for one"
