"""Optimizers of several kinds on ranks: sharded, stopped within epochs, and resumed on another number of ranks."""

from pathlib import Path
from typing import Any

import pytest
from trainings import Run, Trained, assert_alike, assert_same, trains

pytestmark = pytest.mark.slow

ALONE, TWO, THREE = Run("torch", "single", 1), Run("torch", "torch.distributed", 2), Run("torch", "torch.distributed", 3)

SPECS: dict[str, Any] = {
    "muon": {"class": "muon", "momentum": 0.9, "others": {"class": "adamw", "weight_decay": 0.01}},
    "list": [
        {"class": "sgd", "momentum": 0.9, "parameters": ["first.*"], "learning_rate_multiplier": 0.1},
        {"class": "adamw", "learning_rate_multipliers": {"last.bias": 2.0}},
    ],
    "schedule_free": {"class": "schedulefree.AdamWScheduleFree", "warmup_steps": 5},
    "lamb": {"class": "torch_optimizer.Lamb", "learning_rate_multiplier": 0.5},
    "frozen": {"class": "adamw"},
    "random": {"class": "pytorch_optimizer.Kron"},
}
"""`random` draws random numbers in its updates: the same on all ranks."""

KEYS: dict[str, dict[str, object]] = {"frozen": {"freeze_until_step": {"first.*": 9}, "gradient_clip_global_norm": 1.0}}
"""More keys of some of these trainings."""

SHORT: dict[str, object] = {"losses": "mean", "ordering": "sorted", "parts": 2}
"""Epochs of ten steps."""

SHARDED = "{'backend': 'gloo', 'sharded': True}"


@trains(slow=[ALONE, TWO])
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    made: dict[str, dict[str, object]] = {}
    for name, spec in SPECS.items():
        made[name] = {**SHORT, "optimizer": spec, "num_epochs": 2, "evaluated": True, **KEYS.get(name, {})}
        if name != "random":
            stops = {"fault": f"SIGTERM,{run.size - 1},14", "save_interval_steps": 4}
            made[f"{name}.stopped"] = made[name] | stops | ({"torch_distributed": SHARDED} if run == TWO else {})
    return made


@pytest.mark.parametrize("run", [ALONE, TWO], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_stopped_and_sharded_trainings_are_bit_equal(trained: Trained, run: Run, name: str) -> None:
    results = trained(trainings, run)
    for other in (one for one in results.names if one.startswith(f"{name}.")):
        for rank in range(run.size):
            assert_same(results.weights(name), results.weights(other, rank))
        assert results.scores(name) == results.scores(other), "those of the evaluations, too"


@pytest.mark.parametrize("name", SPECS)
def test_two_ranks_compute_what_one_does(trained: Trained, name: str) -> None:
    alone, two = trained(trainings, ALONE), trained(trainings, TWO)
    assert_same(two.weights(name, 0), two.weights(name, 1))
    if name != "random":  # which amplifies rounding, as its name says
        # Muon computes in bfloat16, so that rounding of the gradients may have a visible effect.
        assert_alike(alone.weights(name), two.weights(name), 0.02 if name == "muon" else 1e-3)


@trains(slow=[THREE])
def first_epoch(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return changing(run, folder)


@trains(slow=[ALONE], after=THREE)
def second_epoch(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return changing(run, folder)


def changing(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """Three ranks with a sharded optimizer train the first epoch, and one rank the second."""
    made = {}
    for name in ("muon", "schedule_free"):
        model = folder.parent.parent / f"changing-{name}" / "model"
        keys = {**SHORT, "optimizer": SPECS[name], "model": model, "num_epochs": 2 if run == ALONE else 1}
        made[name] = keys | ({} if run == ALONE else {"torch_distributed": SHARDED})
    return made


@pytest.mark.parametrize("name", ["muon", "schedule_free"])
def test_another_number_of_ranks_goes_on_with_the_state(trained: Trained, name: str) -> None:
    """As on one rank throughout."""
    whole, first, last = trained(trainings, ALONE), trained(first_epoch, THREE), trained(second_epoch, ALONE)
    assert "training continues after epoch 1" in last.out(name)
    assert_alike(whole.weights(name), last.weights(name), 0.02 if name == "muon" else 1e-3)
    with pytest.raises(AssertionError):
        assert_alike(first.weights(name), last.weights(name), 0.02)
