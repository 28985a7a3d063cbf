"""Computing in half precision: the keys, and the scale of the loss."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from launching import faults, refused
from learners import BATCH, learner_of

from hvdtrain.context import get_run_ctx
from hvdtrain.errors import TrainingError
from hvdtrain.learner.precision import (
    FLOAT32,
    LARGEST,
    MAX_SKIPPED,
    LossScale,
    Precision,
    PrecisionKeys,
    ScaleOptions,
    cpu_emulates_bfloat16,
    parse_scale_options,
)


def problems(**keys: Any) -> list[str]:
    return faults(PrecisionKeys(**keys).problems())


@pytest.mark.parametrize(
    ("about", "lacks"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f\n\nprocessor : 1\nflags : fpu avx512f\n", True),
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16 avx512_fp16\n", False),
        ("processor : 0\nFeatures\t: fp asimd\n", True),
        ("processor : 0\nFeatures\t: fp asimd bf16\n", False),
        ("processor : 0\n", False),
        (None, False),
    ],
)
def test_whether_a_cpu_computes_in_bfloat16(about: str | None, lacks: bool, tmp_path: Path) -> None:
    if about is not None:
        (tmp_path / "cpuinfo").write_text(about)
    assert cpu_emulates_bfloat16(tmp_path / "cpuinfo") is lacks


def test_a_scale_halves_where_gradients_overflow_and_doubles_after_many_that_do_not() -> None:
    scale = LossScale(ScaleOptions(init_scale=8, growth_interval=3))
    assert [(scale.update(finite), scale.scale) for finite in (False, True, True, False, True, True, True, True)] == [
        (True, 4.0),
        (False, 4.0),
        (False, 4.0),
        (True, 2.0),
        (False, 2.0),
        (False, 2.0),
        (True, 4.0),
        (False, 4.0),
    ]


def test_a_scale_goes_on_where_it_was() -> None:
    options = ScaleOptions(growth_interval=3)
    first, second = LossScale(options), LossScale(options)
    for finite in (False, True, True):
        first.update(finite)
    second.restore(first.state())
    assert second.scale == first.scale == 2.0**15
    assert second.update(True)
    assert second.scale == 2.0**16


def test_a_scale_stays_a_number_and_knows_whether_an_overflow_may_be_its_fault() -> None:
    scale = LossScale(ScaleOptions(init_scale=1.0, growth_interval=1))
    for _ in range(1000):
        scale.update(True)
    assert scale.scale == LARGEST
    while scale.explains_overflow:
        scale.update(False)
    assert scale.scale == 0.5


def test_options_of_a_scale_are_checked_all_at_once() -> None:
    assert parse_scale_options({"init_scale": 4, "growth_interval": 10}, "x") == ScaleOptions(init_scale=4, growth_interval=10)
    assert parse_scale_options({"enabled": False}, "x") is None
    numbers = {"init_scale": 0, "growth_factor": 1, "backoff_factor": 2, "growth_interval": 0}
    with refused(*(f"x.{name}: out-of-range" for name in numbers), "x.speed: unknown-key"):
        parse_scale_options({**numbers, "speed": 1}, "x")


def test_what_the_keys_mean() -> None:
    def meaning(**keys: Any) -> tuple[str, bool]:
        precision = PrecisionKeys(**keys).precision()
        return precision.dtype, precision.loss_scale(precision.dtype) is not None

    assert meaning() == ("float32", False)
    assert meaning(mixed_precision="bfloat16") == ("bfloat16", False)
    assert meaning(mixed_precision="float16") == ("float16", True)
    assert meaning(mixed_precision="float16", grad_scaler=None) == ("float16", False)
    assert meaning(mixed_precision="bfloat16", grad_scaler={}) == ("bfloat16", True)
    assert meaning(mixed_precision={"dtype": "float16", "grad_scaler": None}) == ("float16", False)
    assert meaning(mixed_precision={"dtype": "float16"}, grad_scaler={"enabled": False}) == ("float16", False)
    scale = Precision("float16", ScaleOptions(init_scale=4.0)).loss_scale("float16")
    assert scale is not None
    assert scale.scale == 4.0


def test_mistakes_in_the_keys() -> None:
    assert problems(mixed_precision="half") == ["mixed_precision: wrong-type"]
    assert problems(mixed_precision={}) == ["mixed_precision.dtype: wrong-type"]
    assert problems(mixed_precision={"dtype": "float16", "grad_scaller": 1}) == ["mixed_precision.grad_scaller: unknown-key"]
    assert problems(grad_scaler=True) == ["grad_scaler: wrong-type"]
    assert problems(grad_scaler={"init_scale": -1}) == ["grad_scaler.init_scale: out-of-range"]


FRAMES = numpy.array([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [0.0, 0.0]]], numpy.float32)


def linear(**_: Any) -> torch.nn.Module:
    """From 2 features to 1, weights 1 and 1, no bias."""
    layer = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    return layer


def learner(train_step: Callable[..., None], precision: Precision, **keys: Any) -> Any:
    return learner_of(linear, train_step, options={"precision": precision}, **keys)


def times(factor: list[float]) -> Callable[..., None]:
    """The outputs' sum times the first of the factors, which a test changes."""

    def train_step(*, model: torch.nn.Module, extern_data: dict[str, Any], **_: Any) -> None:
        data = extern_data["data"]
        get_run_ctx().mark_as_loss(model(data.raw_tensor)[data.mask].float() * factor[0], "any")

    return train_step


def test_torch_computes_in_half_precision_and_updates_in_single_precision() -> None:
    seen = []

    def step(*, model: torch.nn.Module, extern_data: dict[str, Any], **_: Any) -> None:
        outputs = model(extern_data["data"].raw_tensor)
        seen.append((outputs.dtype, model.weight.dtype))
        get_run_ctx().mark_as_loss(torch.full((70000,), 1.0, dtype=outputs.dtype) * outputs.mean(), "long")  # sums beyond float16

    for dtype in ("bfloat16", "float16"):
        made = learner(step, Precision(dtype))
        made.backward(BATCH)
        gradient = made.model.weight.grad
        assert gradient is not None
        assert gradient.dtype == torch.float32
        made.update(1e-6)
        made.evaluate(BATCH)
        assert made.model.weight.dtype == torch.float32
        assert made.meter.take_scores().means()["long"] == pytest.approx(21 / 4, rel=0.1)
    assert seen == [(torch.bfloat16, torch.float32)] * 2 + [(torch.float16, torch.float32)] * 2


def test_torch_gradients_have_their_true_size_when_they_are_clipped() -> None:
    half = Precision("float16", ScaleOptions(init_scale=1024.0))
    plain, scaled = (learner(times([1.0]), precision, gradient_clip_global_norm=2.0) for precision in (FLOAT32, half))
    for made in (plain, scaled):
        made.backward(BATCH)
        made.update(0.5)
    assert scaled.meter.loss_scale == 1024.0
    assert plain.meter.loss_scale is None
    assert scaled.model.weight.tolist() == [pytest.approx(plain.model.weight[0].tolist(), rel=1e-3)]
    assert (scaled.model.weight - 1).norm().item() == pytest.approx(1.0, rel=1e-3)


def test_torch_leaves_an_update_out_where_the_scale_was_too_large_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    factor = [1.0]
    made = learner(times(factor), Precision("float16", ScaleOptions(init_scale=1024.0, growth_interval=2)))
    scales = []
    for factor[0] in (1.0, 1e6, 1e6, 1.0, 1.0):
        before = made.model.weight.tolist()
        made.backward(BATCH)
        made.update(1e-3)
        scales.append(made.meter.loss_scale)
        assert (made.model.weight.tolist() == before) == (factor[0] != 1.0)
    assert scales == [1024.0, 512.0, 256.0, 256.0, 512.0]
    made.state.contents({}).write(tmp_path / "model", tmp_path / "optimizer")
    made.state.write_rank(tmp_path / "own", ["optimizer"])
    for load in (
        lambda one: one.state.load(tmp_path / "model", tmp_path / "optimizer"),
        lambda one: one.state.load_rank(tmp_path / "own", ["optimizer"]),
    ):
        again = learner(times(factor), Precision("float16"))
        load(again)
        assert again.meter.loss_scale == 512.0
    plain = learner(times(factor), FLOAT32)
    plain.state.load(tmp_path / "model", tmp_path / "optimizer")
    assert plain.meter.loss_scale is None


@pytest.mark.parametrize(("skips", "patience"), [(None, MAX_SKIPPED), (3, 3)])
def test_torch_gives_up_where_gradients_are_broken_whatever_the_scale(skips: int | None, patience: int) -> None:
    made = learner(
        times([float("nan")]),
        Precision("float16", ScaleOptions(init_scale=4.0)),
        num_allowed_consec_invalid_gradient_steps=skips,
    )
    for _ in range(3 + patience):  # with the scales 4, 2 and 1; then it is below 1
        made.backward(BATCH)
        made.update(0.1)
    made.backward(BATCH)
    with pytest.raises(
        TrainingError, match=rf"after {patience} updates were skipped and the loss scale had come down .* for weight"
    ):
        made.update(0.1)
    assert made.model.weight.tolist() == [[1.0, 1.0]]
