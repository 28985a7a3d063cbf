"""The comparison of two runs, on records made by hand."""

from dataclasses import replace
from math import inf

import numpy
import pytest
from prove_records import changed, record

from hvdtrain.data.types import Batch, Padded
from hvdtrain.plugins.prove.compare import SKETCH, checksum, compare, factor, sketch, sum_losses


@pytest.mark.parametrize("shape", [(3, 5), (SKETCH,), (400, 700)])
def test_the_distance_of_sketches_is_that_of_the_tensors(shape: tuple[int, ...]) -> None:
    generator = numpy.random.default_rng(3)
    one = generator.normal(size=shape).astype(numpy.float32)
    for other in (one + 1e-3 * generator.normal(size=shape), numpy.where(one > 3, 0, one), one * 1.5):
        estimate, exact = numpy.linalg.norm(sketch(one) - sketch(other)), numpy.linalg.norm(one - other)
        assert estimate == pytest.approx(exact, rel=1e-6 if one.size <= SKETCH else 0.3)
    assert sketch(one).tolist() == sketch(one.copy()).tolist()


def test_the_same_runs_are_identical() -> None:
    found = compare(record(2), record(1), 1e-3)
    assert found.agree
    assert [each.words for each in (found.losses, found.gradients, found.weights)] == ["identical"] * 3


def test_the_first_update_and_the_first_parameter_that_differ_are_found() -> None:
    run = changed(changed(record(2), "gradients", 1, "bias", 0.02), "gradients", 2, "first", 0.5)
    found = compare(changed(run, "gradients", 0, "last", 1e-5), record(), 1e-3)
    assert not found.agree
    assert found.losses.first is None
    assert found.weights.first is None
    assert (found.gradients.first.number, found.gradients.first.name) == (2, "bias")
    assert found.gradients.first.distance == pytest.approx(0.02, rel=0.3)
    assert (found.gradients.largest.number, found.gradients.largest.name) == (3, "first")
    assert found.gradients.words == "no digit"
    assert compare(run, record(), 0.9).agree


def test_weights_are_counted_from_the_beginning() -> None:
    found = compare(changed(record(2), "weights", 0, "last", 0.1), record(), 1e-3)
    assert (found.first_weights.number, found.first_weights.name) == (0, "last")
    assert compare(changed(record(2), "weights", 1, "last", 0.1), record(), 1e-3).first_weights is None


def test_losses_are_compared_as_means_and_counts_of_errors_are_not() -> None:
    run = record(2)
    run.losses[1]["ce"] = (29.2, 12.0)
    run.losses[0]["errors"] = (8.0, 12.0)
    found = compare(run, record(), 1e-3)
    assert (found.losses.first.number, found.losses.first.name) == (2, "ce")
    assert found.losses.first.distance == pytest.approx(0.2 / 30)
    half = replace(
        record(2), losses=[{name: (total / 2, count / 2) for name, (total, count) in each.items()} for each in run.losses]
    )
    assert compare(half, run, 1e-3).losses.first is None, "the same means"


def test_what_is_not_a_number_differs() -> None:
    run = record(2)
    run.losses[2]["ce"] = (float("nan"), 12.0)
    found = compare(changed(run, "gradients", 2, "last", float("nan")), record(), 1e-3)
    assert found.losses.first.distance == inf
    assert (found.gradients.first.number, found.gradients.first.name, found.gradients.first.distance) == (3, "last", inf)


def test_other_parameters_differ() -> None:
    run = record(2)
    found = compare(replace(run, weights={**run.weights, "more": run.weights["last"]}), record(), 1e-3)
    assert found.weights.first.name == "more"


def test_weights_that_follow_rounding_errors_are_set_aside() -> None:
    """The gradient of `bias` is rounding errors in both runs, and Adam makes steps of the same size of it."""
    one, other = record(2), record()
    for run, factor_of_noise in ((one, 3e-8), (other, 1e-8)):
        run.gradients["bias"][:] *= factor_of_noise
    found = compare(changed(one, "weights", 2, "bias", 0.3), other, 1e-3)
    assert found.agree
    assert found.set_aside == ("bias",)
    assert compare(one, other, 1e-3).set_aside == ()
    assert not compare(changed(one, "weights", 2, "first", 0.3), other, 1e-3).agree


def test_a_factor_of_all_gradients() -> None:
    one, other = record(2), record()
    twice = replace(one, gradients={name: 2 * values for name, values in one.gradients.items()})
    assert factor(twice.gradients, other.gradients, 1e-3) == pytest.approx(2)
    assert factor(changed(twice, "gradients", 0, "first", 0.1).gradients, other.gradients, 1e-3) is None


def test_the_checksum_of_a_step_does_not_depend_on_its_batches() -> None:
    values = numpy.arange(24, dtype=numpy.float32).reshape(3, 4, 2)
    lengths = numpy.array([4, 2, 3], dtype=numpy.int32)

    def batch(chosen: list[int], frames: int) -> Batch:
        data = {"data": Padded(values[chosen][:, :frames], lengths[chosen])}
        return Batch(data, numpy.array(chosen))

    assert checksum(batch([0, 1, 2], 4)) == checksum(batch([2, 0], 4)) + checksum(batch([1], 2))
    assert checksum(batch([0], 4)) != checksum(batch([1], 4))


def test_losses_of_all_ranks() -> None:
    assert sum_losses([{"ce": (1.0, 2.0)}, {"ce": (3.0, 4.0), "more": (1.0, 1.0)}]) == {"ce": (4.0, 6.0), "more": (1.0, 1.0)}
