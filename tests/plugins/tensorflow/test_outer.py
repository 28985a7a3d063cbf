"""The outer optimizers: what they make of an anchor and an average, in both frameworks, and what their key may say.

The name of the file is that of tests that need TensorFlow 2 in their own process (tests/conftest.py).
"""

import importlib
from typing import Any

import numpy
import pytest
import torch
from launching import faults

from hvdtrain.plugins.param_average.interval import NEVER, Quadratic, make_interval
from hvdtrain.plugins.param_average.outer import OuterOptimizer, make_outer

MAKE: dict[str, Any] = {
    "torch": lambda array: torch.tensor(array),
    "tensorflow": lambda array: importlib.import_module("tensorflow").constant(array),
}


def optimizer(**options: Any) -> OuterOptimizer:
    made, problems = make_outer(options, 4)
    assert problems == []
    assert made is not None
    return made


@pytest.mark.parametrize("framework", MAKE)
def test_learning_rate_1_without_momentum_is_the_average_to_the_last_bit(framework: str) -> None:
    generator = numpy.random.default_rng(1)
    for case in range(200):
        size = 10.0 ** generator.integers(-20, 20)  # the two differ by up to 40 orders of magnitude
        anchor, average = (generator.normal(size=50).astype("float32") for _ in range(2))
        anchor *= numpy.float32(size)
        average[0] = -0.0
        for name in ("bmuf", "nesterov", "sgd"):
            outer = optimizer(**{"class": name, "learning_rate": 1.0, "momentum": 0.0})
            new, moments = outer.step(MAKE[framework](anchor), MAKE[framework](average), [], case + 1)
            assert new.numpy().tobytes() == average.tobytes()
            assert moments == []


@pytest.mark.parametrize("framework", MAKE)
@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"class": "sgd", "learning_rate": 0.8, "momentum": 0.6}, lambda p: torch.optim.SGD(p, 0.8, momentum=0.6)),
        ({"class": "nesterov"}, lambda p: torch.optim.SGD(p, 0.7, momentum=0.9, nesterov=True)),
        ({"class": "bmuf"}, lambda p: torch.optim.SGD(p, 1.0, momentum=0.75, nesterov=True)),
        (
            {"class": "adam", "learning_rate": 0.1, "second_momentum": 0.95, "epsilon": 0.01},
            lambda p: torch.optim.Adam(p, 0.1, betas=(0.9, 0.95), eps=0.01),
        ),
    ],
    ids=lambda value: value["class"] if isinstance(value, dict) else "",
)
def test_they_step_as_torchs_optimizers_do_with_the_difference_as_the_gradient(
    framework: str, options: dict[str, Any], same: Any
) -> None:
    generator = numpy.random.default_rng(2)
    expected = torch.nn.Parameter(torch.tensor(generator.normal(size=20).astype("float32")))
    reference, outer = same([expected]), optimizer(**options)
    anchor = MAKE[framework](expected.detach().numpy().copy())
    moments = [anchor * 0 for _ in outer.moments]
    for count in range(1, 9):
        average = anchor + MAKE[framework](generator.normal(size=20).astype("float32"))
        expected.grad = torch.tensor((anchor - average).numpy())
        reference.step()
        anchor, moments = outer.step(anchor, average, moments, count)
        numpy.testing.assert_allclose(anchor.numpy(), expected.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_bmuf_is_nesterovs_block_momentum_as_chen_and_huo_write_it() -> None:
    """W(t) = W(t-1) + D(t) with D(t) = n D(t-1) + z G(t); what is sent to the ranks is W(t) + n D(t)."""
    generator = numpy.random.default_rng(3)
    momentum, rate = 0.6, 0.9
    outer = optimizer(**{"class": "bmuf", "learning_rate": rate, "momentum": momentum})
    model = sent = generator.normal(size=30)
    delta = numpy.zeros(30)
    anchor, moments = torch.tensor(sent), [torch.zeros(30, dtype=torch.float64)]
    for count in range(1, 7):
        average = sent + generator.normal(size=30)
        delta = momentum * delta + rate * (average - sent)
        model = model + delta
        sent = model + momentum * delta
        anchor, moments = outer.step(anchor, torch.tensor(average), moments, count)
        numpy.testing.assert_allclose(anchor.numpy(), sent, rtol=1e-9)


def test_values_of_their_own_and_what_they_say() -> None:
    said = {size: optimizer_of("bmuf", size).describe() for size in (1, 2, 4)}
    assert said[1] == "learning rate 1, Nesterov momentum 0"
    assert said[2] == "learning rate 1, Nesterov momentum 0.5"
    assert said[4] == "learning rate 1, Nesterov momentum 0.75"
    assert optimizer(**{"class": "sgd"}).describe() == "learning rate 1, momentum 0"
    assert optimizer(**{"class": "adam", "learning_rate": 0.01}).describe() == "learning rate 0.01, momentums 0.9 and 0.99"


def optimizer_of(name: str, size: int) -> OuterOptimizer:
    made, _ = make_outer(name, size)
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({}, "class: unknown-value"),
        ("rmsprop", "class: unknown-value"),
        ({"class": "bmuf", "momentum": 1.0}, "momentum: out-of-range"),
        ({"class": "bmuf", "learning_rate": 0}, "learning_rate: out-of-range"),
        ({"class": "bmuf", "momentun": 0.5}, "momentun: unknown-key"),
        ({"class": "bmuf", "epsilon": 0.1}, "epsilon: conflict"),
        ("adam", "learning_rate: missing"),
    ],
    ids=str,
)
def test_mistakes_in_the_key(value: Any, problem: str) -> None:
    made, problems = make_outer(value, 2)
    assert made is None
    assert faults(problems) == [f"horovod_param_outer.{problem}"]


def test_the_quadratic_rule_follows_from_the_rate_alone() -> None:
    made, problems = make_interval({"class": "quadratic", "alpha": 0.1}, 4, None)
    assert problems == []
    rates = [0.1 * 0.9**step for step in range(60)]
    wanted = [max(4, int((0.1 / rate) ** 2 + 1e-6)) for rate in rates]
    assert [made.updates(rate) for rate in rates] == wanted
    assert [made.updates(rate) for rate in reversed(rates)] == wanted[::-1]
    assert made.updates(0.01) == 100
    assert made.updates(0.0) == Quadratic(1, 0.1).updates(1e-12) == NEVER


@pytest.mark.parametrize(
    ("rule", "seconds", "problem"),
    [
        ("linear", None, ".class: unknown-value"),
        ({"class": "quadratic"}, None, ".alpha: missing"),
        ({"class": "constant", "alpha": 1}, None, ".alpha: conflict"),
        ({"class": "quadratic", "alpha": 1.0}, 5.0, ": conflict"),
    ],
    ids=str,
)
def test_mistakes_in_the_rule(rule: Any, seconds: float | None, problem: str) -> None:
    assert faults(make_interval(rule, 4, seconds)[1]) == [f"horovod_param_sync_rule{problem}"]
