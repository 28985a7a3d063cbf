"""Named schedules of the learning rate from step to step."""

import math
from typing import Any

import pytest
from launching import faults

from hvdtrain.plugins.schedules.steps import make_schedule


def made(spec: dict, num_epochs: int) -> Any:
    schedule, problems = make_schedule(spec, num_epochs)
    assert not problems
    return schedule


def factors(spec: dict, positions: list[float], num_epochs: int = 10) -> list[float]:
    """The factors at steps (where the lengths are in steps) or at parts of epochs."""
    schedule = made(spec, num_epochs)
    # What counts is one of the two; the other is far off.
    by_steps = "num_warmup_steps" in spec or "num_steps" in spec
    return [schedule.factor(int(at), 1e9) if by_steps else schedule.factor(10**9, at) for at in positions]


def test_constant_with_a_warm_up() -> None:
    assert factors({"class": "constant"}, [0, 5]) == [1, 1]
    assert factors({"class": "constant", "num_warmup_steps": 4}, [0, 1, 2, 3, 4, 99]) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors({"class": "constant", "num_warmup_steps": 4, "initial": 0.2}, [0, 3]) == pytest.approx([0.4, 1])


def test_linear() -> None:
    spec = {"class": "linear", "num_warmup_steps": 2, "num_steps": 12, "final": 0.5}
    assert factors(spec, [0, 1, 2, 7, 12, 50]) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.5])


def test_the_last_epoch_ends_it_where_nothing_is_said() -> None:
    assert factors({"class": "linear"}, [0, 5, 10, 11]) == pytest.approx([1, 0.5, 0, 0])
    assert factors({"class": "linear", "num_epochs": 4}, [0, 1, 4]) == pytest.approx([1, 0.75, 0])


def test_cosine() -> None:
    spec = {"class": "cosine", "num_warmup_epochs": 2, "final": 0.1}
    assert factors(spec, [0, 1, 2, 6, 10]) == pytest.approx([0, 0.5, 1, 0.55, 0.1])
    assert factors(spec, [4])[0] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


@pytest.mark.parametrize("name", ["linear", "cosine", "one_cycle"])
def test_a_warm_up_in_steps_and_an_end_in_epochs(name: str) -> None:
    """50 steps an epoch: the shape is that of a schedule in steps alone; it ends with the last epoch if nothing is said."""
    mixed = made({"class": name, "num_warmup_steps": 20}, 4)
    in_steps = made({"class": name, "num_warmup_steps": 20, "num_steps": 200}, 4)
    own = [mixed.factor(step, step / 50) for step in range(210)]
    assert own == pytest.approx([in_steps.factor(step, step / 50) for step in range(210)])
    assert own[19:21] == pytest.approx([1, 1])
    assert own[110] == pytest.approx(0.5)
    assert own[199] > own[200] == own[209] == 0
    given = made({"class": name, "num_warmup_steps": 20, "num_epochs": 2}, 4)
    assert given.factor(99, 99 / 50) > given.factor(100, 2.0) == 0


def test_a_warm_up_in_epochs_and_an_end_in_steps() -> None:
    mixed = made({"class": "linear", "num_warmup_epochs": 0.5, "num_steps": 125}, 4)
    found = [mixed.factor(step, step / 50) for step in (0, 5, 25, 75, 125, 130)]
    assert found == pytest.approx([0, 0.2, 1, 0.5, 0, 0])


def test_a_warm_up_that_is_longer_than_the_schedule_never_ends() -> None:
    mixed = made({"class": "linear", "num_warmup_steps": 1000}, 4)
    assert [mixed.factor(step, step / 50) for step in (0, 199)] == [0.001, 0.2]


def test_inverse_square_root() -> None:
    # Vaswani et al.: min(step ** -0.5, step * warmup ** -1.5), relative to its peak.
    own = factors({"class": "inverse_square_root", "num_warmup_steps": 100}, list(range(1000)))
    paper = [min(step**-0.5, step * 100**-1.5) * 100**0.5 for step in range(1, 1001)]
    assert own == pytest.approx(paper)


def test_one_cycle() -> None:
    own = factors({"class": "one_cycle", "num_steps": 100}, [0, 14, 29, 30, 65, 100])
    assert own[0] == pytest.approx(0.04, abs=0.01)
    assert own[1] == pytest.approx(0.52)
    assert own[2:] == pytest.approx([1, 1, 0.5, 0])


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("triangle", "class: unknown-value"),
        ({"class": "cosin", "num_warmup_steps": 3}, "class: unknown-value"),
        ({"num_steps": 3}, "class: unknown-value"),
        ({"class": "linear", "num_step": 3}, "num_step: unknown-key"),
        ({"class": "linear", "num_steps": 0}, "num_steps: out-of-range"),
        ({"class": "linear", "num_warmup_steps": 9, "num_steps": 9}, "num_warmup_steps: out-of-range"),
        ({"class": "linear", "num_warmup_epochs": 10}, "num_warmup_epochs: out-of-range"),
        ({"class": "linear", "num_warmup_epochs": 3, "num_epochs": 2}, "num_warmup_epochs: out-of-range"),
        ({"class": "linear", "num_steps": 9, "num_epochs": 9}, "num_steps: conflict"),
        ({"class": "inverse_square_root", "num_warmup_steps": 9, "num_warmup_epochs": 1}, "num_warmup_steps: conflict"),
        ({"class": ["linear"]}, "class: unknown-value"),
        ("inverse_square_root", "num_warmup_steps: missing"),
    ],
)
def test_problems(spec: object, problem: str) -> None:
    schedule, found = make_schedule(spec, 10)
    assert (schedule, faults(found)) == (None, [f"learning_rate_schedule.{problem}"])
