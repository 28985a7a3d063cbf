"""The model of a step on other numbers of ranks, on measurements that are made up, and the fit of measurements."""

import re
from dataclasses import replace

import numpy
import pytest

from hvdtrain.plugins.trial.keys import Placement, parse_placements
from hvdtrain.plugins.trial.predict import (
    METHODS,
    Exchange,
    Measurement,
    Method,
    Prediction,
    Work,
    best,
    expected_maximum,
    largest_share,
    predict,
    slowdown,
)
from hvdtrain.plugins.trial.scaling import fit, lines

GRAD, EVERY_1, EVERY_16, EVERY_64 = METHODS
EXCHANGE = Exchange(latency=0.0, bucket_bytes=1000, bucket_seconds=0.001, parameters_seconds=0.02, waited=0.0)
MEASURED = Measurement(
    size=2,
    per_host=1,
    hosts=2,
    cores=4,
    threads=None,
    on_cpu=True,
    fixed=0.1,
    per_frame=0.0,
    jitter=(),
    slow_rank=0.0,
    reading_per_frame=0.0,
    parameters=20_000,
    steps_per_update=1,
    exchange=EXCHANGE,
)
EVEN = Work(numpy.full(6400, 50), 64_000)
"""10 sequences in every batch, batches that 64 ranks can share."""


def of(measured: Measurement, ranks: int, method: Method = GRAD, work: Work = EVEN, per_host: int | None = None) -> Prediction:
    placement = Placement(ranks, per_host)
    made = predict(measured, {1: work, ranks: work}, [placement])
    return next(one for one in made if one.method == method or ranks == 1)


@pytest.mark.parametrize("text", ["", "0", "-1", "2,", "2;3", "x", "2:0", "2:", True, None, (), [2, "y"], 2.5])
def test_numbers_of_ranks_that_are_none(text: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the message is the rule's, not the parser's
        parse_placements(text)


def test_numbers_of_ranks() -> None:
    assert parse_placements(8) == parse_placements("8") == [Placement(8)]
    assert parse_placements("2,64:4") == parse_placements(["2", "64:4"]) == [Placement(2), Placement(64, 4)]


def test_computing_alone_scales_perfectly() -> None:
    for ranks in (1, 2, 64):
        for method in METHODS:
            made = of(replace(MEASURED, exchange=replace(EXCHANGE, bucket_seconds=0.0, parameters_seconds=0.0)), ranks, method)
            assert made.seconds == pytest.approx(0.1)
            assert made.rate == pytest.approx(100 * ranks)
            assert made.speed_up == pytest.approx(ranks)
            assert made.limit == "computing"


def test_the_measured_wait_comes_out_again() -> None:
    """20 messages of 1 ms, half of which a step waits for."""
    measured = replace(MEASURED, exchange=replace(EXCHANGE, waited=0.5))
    assert of(measured, 2).network == pytest.approx(0.010)
    assert of(measured, 2, EVERY_1).network == pytest.approx(0.020)
    assert of(measured, 2, EVERY_16).network == pytest.approx(0.020 / 16)
    assert of(replace(measured, steps_per_update=4), 2).network == pytest.approx(0.0025)
    assert of(replace(measured, steps_per_update=4), 2, EVERY_16).network == pytest.approx(0.020 / 64)


def test_bytes_grow_as_in_a_ring_and_latency_as_in_a_tree() -> None:
    waited = replace(EXCHANGE, waited=1.0)
    assert of(replace(MEASURED, exchange=waited), 64).network == pytest.approx(0.020 * (63 / 64) / (1 / 2))
    messages = replace(waited, latency=0.001)
    assert of(replace(MEASURED, exchange=messages), 64).network == pytest.approx(20 * 0.001 * 6)
    small = replace(MEASURED, parameters=500, exchange=replace(waited, bucket_seconds=0.003, latency=0.001))
    assert of(small, 2).network == pytest.approx(0.001 + 0.002 / 2)


def test_more_than_backward_takes_cannot_be_hidden() -> None:
    measured = replace(MEASURED, exchange=replace(EXCHANGE, bucket_seconds=0.01, waited=0.0))  # 0.2 s in all
    assert of(measured, 2).network == pytest.approx(0.2 - 0.1 * 2 / 3)
    assert of(measured, 2).limit == "network"


def test_without_a_measured_network_none_is_predicted() -> None:
    alone = replace(MEASURED, size=1, hosts=1, exchange=None)
    assert of(alone, 8).network is None
    assert of(alone, 8).speed_up == pytest.approx(8)
    assert of(alone, 1).network == 0.0
    text = "\n".join(lines(alone, predict(alone, {1: EVEN, 8: EVEN}, [Placement(8)])))
    assert "unknown" in text
    assert "the network was not measured" in text


def test_batches_are_waited_for_as_the_plan_has_them() -> None:
    measured = replace(MEASURED, fixed=0.0, per_frame=0.001)
    uneven = Work(numpy.array([100, 300] * 100), 1000)
    assert of(measured, 2, work=uneven).batches == pytest.approx(0.1)
    assert of(measured, 2, EVERY_16, work=uneven).batches == pytest.approx(0.1), "rank 1 always has the larger one"
    turns = Work(numpy.array([100, 300, 300, 100] * 64), 1000)
    assert of(measured, 2, EVERY_16, work=turns).batches == pytest.approx(0.0)
    assert of(measured, 2, work=turns).limit == "uneven batches"
    balanced = Work(numpy.sort(turns.costs), 1000)
    assert of(measured, 2, work=balanced).batches == pytest.approx(0.0)


def test_ranks_without_a_batch_are_idle() -> None:
    made = of(MEASURED, 64, work=Work(numpy.full(32, 50), 320))
    assert (made.computing, made.idle) == (pytest.approx(0.05), pytest.approx(0.05))
    assert (made.rate, made.limit) == (pytest.approx(3200), "too few batches")
    assert largest_share(numpy.ones(5), 2, 2) == pytest.approx(1.0)


def test_chance_is_waited_for_less_where_ranks_meet_less() -> None:
    measured = replace(MEASURED, jitter=tuple(numpy.random.default_rng(0).normal(0, 0.01, 1000).tolist()))
    once = [of(measured, ranks).jitter for ranks in (1, 2, 8, 64)]
    assert once[0] == 0.0
    assert numpy.allclose(once[1:], [0.0056, 0.0142, 0.0238], rtol=0.1)  # the expected maxima of normal numbers
    assert of(measured, 8, EVERY_16).jitter == pytest.approx(once[2] / 4)
    assert of(replace(measured, exchange=None), 64, EVERY_1).limit == "uneven steps"


def test_the_expected_maximum_is_that_of_many_draws() -> None:
    generator = numpy.random.default_rng(0)
    samples = generator.exponential(1.0, 400) - 1
    for count in (2, 5, 20):
        drawn = generator.choice(samples, (20_000, count)).max(axis=1).mean() - samples.mean()
        assert expected_maximum(samples.tolist(), count) == pytest.approx(drawn, rel=0.03)
    assert expected_maximum([0.1] * 5, 10) == pytest.approx(0.0)
    assert expected_maximum([], 10) == 0.0
    few = [-1.0, 1.0]
    assert expected_maximum(few, 1000) > 3, "the largest of many is larger than any sample"


def test_a_slow_rank_is_waited_for_however_seldom_ranks_meet() -> None:
    slow = replace(MEASURED, slow_rank=0.05)
    for method in METHODS:
        assert of(slow, 8, method).slow_rank == 0.05
        assert of(slow, 8, method).limit == "a slow rank"
    assert of(slow, 1).seconds == pytest.approx(0.1)


def test_reading_counts_where_it_takes_longer_than_all_else() -> None:
    assert of(replace(MEASURED, reading_per_frame=0.001), 2).data == pytest.approx(0.0), "0.05 s of 0.1"
    made = of(replace(MEASURED, reading_per_frame=0.006), 2)
    assert (made.data, made.seconds, made.limit) == (pytest.approx(0.2), pytest.approx(0.3), "data (reading)")


@pytest.mark.parametrize(
    ("threads", "measured_on", "per_host", "expected"),
    [
        (None, 1, 1, 1.0),
        (None, 1, 4, 4.0),  # 4 cores for one rank, then 1 for each
        (None, 4, 1, 0.25),
        (None, 2, 8, 4.0),
        (1, 1, 4, 1.0),
        (1, 1, 8, 2.0),
        (1, 8, 1, 0.5),
        (8, 1, 2, 2.0),
    ],
)
def test_cores_are_shared(threads: int | None, measured_on: int, per_host: int, expected: float) -> None:
    measured = replace(MEASURED, threads=threads, per_host=measured_on)
    assert slowdown(measured, per_host) == pytest.approx(expected)
    assert slowdown(replace(measured, on_cpu=False), per_host) == 1.0


def test_a_speed_up_is_compared_with_one_rank_alone_on_a_host() -> None:
    shared = replace(MEASURED, size=4, per_host=4, hosts=1, exchange=replace(EXCHANGE, bucket_seconds=0, parameters_seconds=0))
    assert of(shared, 4).speed_up == pytest.approx(1.0), "4 ranks share the cores that one has alone"
    assert of(shared, 4, per_host=1).speed_up == pytest.approx(4.0)


def test_the_best_is_the_first_that_is_nearly_as_fast() -> None:
    made = predict(MEASURED, {1: EVEN, 2: EVEN}, [Placement(2)])
    assert best(made).method == GRAD
    expensive = replace(MEASURED, exchange=replace(EXCHANGE, parameters_seconds=0.02, waited=3.0))
    assert best(predict(expensive, {1: EVEN, 2: EVEN}, [Placement(2)])).method == EVERY_16


def test_lines_of_the_prediction() -> None:
    work = {1: EVEN, 2: EVEN, 64: EVEN}
    text = lines(MEASURED, predict(MEASURED, work, parse_placements("1,2,64")))
    table = [line for line in text if re.match(r" +\d", line)]
    assert len(table) == 1 + 4 + 4
    assert table[0].split() == ["1", "grad", "100", "1", "100", "ms", "0%", "0%", "computing"]
    assert ["64*" in line for line in table] == [False] * 5 + [True] * 4
    assert "2 ranks: grad is as fast as any: 2 times the speed of one rank, limited by computing" in text
    assert any("extrapolated from 2 ranks" in line for line in text)
    assert not any("extrapolated" in line for line in lines(MEASURED, predict(MEASURED, work, [Placement(2)])))
    on_one = replace(MEASURED, hosts=1, per_host=2)
    assert any("between hosts" in line for line in lines(on_one, predict(on_one, work, [Placement(64)])))
    assert not any("between hosts" in line for line in lines(on_one, predict(on_one, work, [Placement(2)])))


def test_a_fit_finds_what_measurements_were_made_of() -> None:
    generator = numpy.random.default_rng(0)
    costs = numpy.linspace(100, 2000, 20)
    noise = generator.normal(0, 0.002, (4, 3, 20))
    fixed, per_frame, jitter, slow_rank = fit(costs, 0.03 + 1e-4 * costs + noise)
    assert (fixed, per_frame, slow_rank) == (pytest.approx(0.03, rel=0.1), pytest.approx(1e-4, rel=0.05), 0.0)
    assert numpy.std(jitter) == pytest.approx(0.002, rel=0.1)
    late = noise + numpy.array([0, 0, 0.04, 0])[:, None, None]
    fixed, per_frame, jitter, slow_rank = fit(costs, 0.03 + 1e-4 * costs + late)
    assert (fixed, slow_rank) == (pytest.approx(0.03, rel=0.1), pytest.approx(0.04, rel=0.1))
    assert numpy.std(jitter) == pytest.approx(0.002, rel=0.1)


def test_a_fit_of_measurements_that_tell_little() -> None:
    alike = fit(numpy.full(4, 50.0), numpy.full((1, 2, 4), 0.1))
    assert alike[:2] == (pytest.approx(0.1), 0.0)
    falling = fit(numpy.array([1.0, 2.0]), numpy.array([[[0.2, 0.1]]]))
    assert falling[:2] == (pytest.approx(0.15), 0.0)
    steep = fit(numpy.array([1.0, 2.0]), numpy.array([[[0.0, 0.3]]]))
    assert steep[:2] == (0.0, pytest.approx(0.1))
