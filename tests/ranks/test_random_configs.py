"""Random configs train what a plain loop of PyTorch trains over the same batches: on any number of ranks, stopped and resumed.

Every run draws others (fuzzing.py), with PyTorch and Keras, over Horovod and torch.distributed.
"""

import math
import random
from itertools import groupby
from pathlib import Path
from typing import Any

import h5py
import numpy
import pytest
import torch
from fuzzing import cases, generator
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainings import ResultsOf, Run, assert_same, marked, saved_model, trains

pytestmark = pytest.mark.fuzz

NUM_SEQUENCES = 12
"""Of all ranks' batches in a step."""

EPOCHS = 2

OPTIMIZERS: list[dict[str, Any]] = [
    {"class": "sgd"},
    {"class": "sgd", "momentum": 0.9, "nesterov": True},
    {"class": "adam"},
    {"class": "adamw", "weight_decay": 0.1},
    {"class": "RMSprop", "alpha": 0.9},
    {"class": "Adagrad"},
]
OF_PYTORCH = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}

SCHEDULES: list[Any] = [
    None,
    "cosine",
    "linear",
    {"class": "cosine", "num_warmup_epochs": 0.3, "final": 0.1},
    {"class": "linear", "num_steps": 35},
    {"class": "constant", "num_warmup_steps": 9},
    "one_cycle",
]

ENDS = ("min", "max")
FEATURES: list[dict[str, Any]] = [
    {"gradient_clip_global_norm": 0.3},
    {"gradient_clip_global_norm": 30.0},
    {"gradient_clip": 0.1},
    {"grad_scaler": {"init_scale": 1024.0, "growth_interval": 10}},
    {"num_allowed_consec_invalid_gradient_steps": 3},
    {"ema_decay": 0.9},
    {"gradient_noise": 0.01},
    # Not with Keras:
    {"layers": "reused"},
    {"layers": "only_statistics", "sync_batch_norm": True, "parts": 1, **{f"{end}_seq_length": {"data": 6} for end in ENDS}},
    {"freeze_until_step": {"first.*": 8}},
    {"checkpoint_modules": ["first"]},
    {"more": {"learning_rate_multipliers": {"last.*": 0.1}}},
    {"more": {"weight_decay": 0.1, "weight_decay_modules_blacklist": ["Conv1d", "BatchNorm1d"]}},
]
"""A config has two of them, which nobody may have tried together. BatchNorm counts padding, so it gets none. `more` is for the
optimizer."""

OF_KERAS = 7
NOT_IN_THE_LOOP = ("ema_decay", "gradient_noise")

TORCH = [Run("torch", "single", 1), Run("torch", "horovod", 2)]
KERAS = [Run("tensorflow", "single", 1), Run("tensorflow", "horovod", 2)]
DISTRIBUTED = Run("torch", "torch.distributed", 2)
CASES = [*TORCH, *marked([DISTRIBUTED], pytest.mark.slow)]


def drawn(framework: str, case: int) -> dict[str, Any]:
    """The keys of a random config."""
    chance = generator(f"random configs {framework}", case)
    losses = chance.choice(["sum", "mean"])
    optimizer = chance.choice(OPTIMIZERS if framework == "torch" else OPTIMIZERS[:3])
    adapts = optimizer["class"] != "sgd"
    given = {
        "losses": losses,
        "optimizer": optimizer,
        "learning_rate": 0.003 if adapts else 0.03 if losses == "mean" else 0.0002,
        "learning_rate_schedule": chance.choice(SCHEDULES),
        "accum_grad_multiple_step": chance.choice([1, 1, 2, 3]),
        "parts": chance.choice([1, 1, 2]),
        "ordering": chance.choice(["random", "laplace:.5", "sorted", "default"]),
        "random_seed": chance.randrange(10**6),
    }
    for feature in chance.sample(FEATURES[: OF_KERAS if framework == "tensorflow" else None], 2):
        given |= feature
    given["optimizer"] = {**optimizer, **given.pop("more", {})}
    return {key: value for key, value in given.items() if value is not None}


def all_cases(framework: str) -> range:
    return range(cases(2 if framework == "torch" else 1))


@trains(*TORCH, slow=[DISTRIBUTED, *KERAS])
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """Every training twice: in one go, and stopped twice."""
    made: dict[str, dict[str, object]] = {}
    for case in all_cases(run.framework):
        given = {**drawn(run.framework, case), "num_epochs": EPOCHS, "record": True, "max_seqs": NUM_SEQUENCES // run.size}
        chance = random.Random(case)
        if run.transport == "torch.distributed":
            given["torch_distributed"] = {"backend": "gloo", "sharded": "ema_decay" not in given and chance.random() < 0.5}
        made[f"{case}.whole"] = given
        stops = (1, 2) if "min_seq_length" in given else (chance.randrange(2, 7), chance.randrange(11, 16))
        made[f"{case}.stopped"] = {**given, "fault": f"SIGTERM,{run.size - 1},{stops[0]},{stops[1]}"}
    return made


class Plain(nn.Module):
    """The models of toy/config.py."""

    def __init__(self, layers: str) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 8, 3, padding=1)
        self.last = nn.Linear(8, 5)
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.middle = nn.Linear(8, 8) if layers == "reused" else None
        self.norm = nn.BatchNorm1d(4) if layers == "only_statistics" else None

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        channels = frames.transpose(1, 2)
        hidden = self.first(channels if self.norm is None else self.norm(channels)).transpose(1, 2).relu()
        for _ in range(3 if self.middle is not None else 0):
            # PyTorch computes no gradient of what is called on a tensor that needs none, as while `first` is frozen.
            hidden = checkpoint(lambda values: self.middle(values).tanh(), hidden, use_reentrant=True)  # type: ignore[misc]
        return self.last(hidden)  # type: ignore[no-any-return]


def model_of(given: dict[str, Any]) -> Plain:
    torch.manual_seed(1)
    return Plain(given.get("layers", "plain"))


def factor(schedule: Any, step: int, epochs: float) -> float:
    """What docs/learning_rate.md says of the schedules that the loop has."""
    options = {"class": schedule} if isinstance(schedule, str) else schedule or {"class": "constant"}
    if (warmup := options.get("num_warmup_steps", 0)) > step:
        return (step + 1) / warmup
    if (warmup := options.get("num_warmup_epochs", 0.0)) > epochs:
        return epochs / warmup
    place = step / options["num_steps"] if "num_steps" in options else (epochs - warmup) / (EPOCHS - warmup)
    place = min(place, 1.0)
    shape = {"constant": 1.0, "linear": 1 - place, "cosine": 0.5 * (1 + math.cos(math.pi * place))}[options["class"]]
    final = options.get("final", 0.0)
    return final + (1 - final) * shape


def loop(given: dict[str, Any], corpus: Path, ids: list[tuple[int, int]]) -> dict[str, numpy.ndarray]:
    """The weights that a plain loop of PyTorch trains on these sequences, each with the number of its epoch."""
    model = model_of(given)
    options = dict(given["optimizer"])
    kind, decay = OF_PYTORCH[options.pop("class")], options.pop("weight_decay", 0.0)
    exempt = ("first", "norm") if options.pop("weight_decay_modules_blacklist", None) else ()
    slow = "last." if options.pop("learning_rate_multipliers", None) else "none"
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    groups = [  # biases never decay
        {
            "params": [one],
            "weight_decay": 0.0 if name.endswith("bias") or name.startswith(exempt) else decay,
            "factor": 0.1 if name.startswith(slow) else 1.0,
        }
        for name, one in trained
    ]
    optimizer = kind(groups, lr=1.0, **options)
    with h5py.File(corpus / "train.hdf") as file:
        ends = numpy.cumsum(file["seqLengths"][:, 0])
        inputs = numpy.split(file["inputs"][:], ends[:-1])
        targets = numpy.split(file["targets/data/classes"][:].astype(numpy.int64), ends[:-1])
    step = 0
    for epoch, pairs in groupby(ids, key=lambda one: one[0]):
        own = [number for _, number in pairs]
        batches = [own[first : first + NUM_SEQUENCES] for first in range(0, len(own), NUM_SEQUENCES)]
        many = given["accum_grad_multiple_step"]
        for first in range(0, len(batches), many):
            together = batches[first : first + many]
            total, count = torch.zeros(()), 0
            model.first.requires_grad_("freeze_until_step" not in given or step >= 8)
            for batch in together:
                sets = [batch] if model.norm is not None else [[number] for number in batch]  # which has no padding
                for numbers in sets:
                    frames = torch.from_numpy(numpy.stack([inputs[number] for number in numbers]))
                    classes = torch.from_numpy(numpy.concatenate([targets[number] for number in numbers]))
                    total = total + nn.functional.cross_entropy(model(frames).flatten(0, 1), classes, reduction="sum")
                    count += len(classes)
            (total / count if given["losses"] == "mean" else total).backward()
            every = [one for _, one in trained if one.grad is not None]
            if "gradient_clip" in given:
                nn.utils.clip_grad_value_(every, given["gradient_clip"])
            if "gradient_clip_global_norm" in given:
                nn.utils.clip_grad_norm_(every, given["gradient_clip_global_norm"])
            step += len(together)
            place = epoch - 1 + first * NUM_SEQUENCES / len(own)
            for group in optimizer.param_groups:
                group["lr"] = (
                    group["factor"] * given["learning_rate"] * factor(given.get("learning_rate_schedule"), step - 1, place)
                )
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def first_weights(given: dict[str, Any]) -> dict[str, numpy.ndarray]:
    return {name: tensor.numpy() for name, tensor in model_of(given).state_dict().items()}


def assert_close(
    one: dict[str, numpy.ndarray], other: dict[str, numpy.ndarray], before: dict[str, numpy.ndarray] | None, what: object
) -> None:
    """Equal up to a small share of what the training changed, or, with no weights of before, of the weights."""
    assert one.keys() == other.keys()
    for name, array in one.items():
        change = numpy.abs(array - (before[name] if before else 0)).max()
        difference = numpy.abs(array.astype(float) - other[name]).max()
        assert difference <= 3e-4 * change + 1e-7, f"{name} differs by {difference:.3g} of {change:.3g} with {what}"


@pytest.mark.parametrize("run", CASES, ids=str)
def test_random_configs_train_what_a_loop_of_pytorch_trains(results: ResultsOf, corpus: Path, run: Run) -> None:
    """Where the loop has what they use; a config with noise or an average is compared with the same on one rank."""
    for case in all_cases("torch"):
        given, name = drawn("torch", case), f"{case}.whole"
        alone = results(run.alone)
        lines = alone.needed(f"{name}.ids.0").read_text().splitlines()
        ids = [(int(epoch), int(number)) for epoch, number in map(str.split, lines)]
        assert results(run).trained_on(name) == alone.trained_on(name), given
        expected = alone.weights(name)
        if given.get("learning_rate_schedule") != "one_cycle" and not any(key in given for key in NOT_IN_THE_LOOP):
            expected = loop(given, corpus, ids)
        assert_close(expected, results(run).weights(name), first_weights(given), given)


@pytest.mark.slow
@pytest.mark.parametrize("run", KERAS[1:], ids=str)
def test_random_configs_of_keras_train_the_same_on_any_number_of_ranks(results: ResultsOf, run: Run) -> None:
    for case in all_cases("tensorflow"):
        name = f"{case}.whole"
        assert results(run).trained_on(name) == results(run.alone).trained_on(name)
        assert_close(results(run.alone).weights(name), results(run).weights(name), None, drawn("tensorflow", case))


@pytest.mark.parametrize("run", [*CASES, *marked(KERAS, pytest.mark.slow)], ids=str)
def test_random_configs_that_are_stopped_end_bit_for_bit_as_if_they_were_not(results: ResultsOf, run: Run) -> None:
    for case in all_cases(run.framework):
        whole, stopped = f"{case}.whole", f"{case}.stopped"
        assert "stopped by SIGTERM" in results(run).out(stopped)
        for rank in range(run.size):
            assert_same(results(run).weights(whole, rank), results(run).weights(stopped, rank))
        files = [saved_model(results(run).models[name], EPOCHS) for name in (whole, stopped)]
        assert_same(*files)
        assert results(run).scores(whole) == results(run).scores(stopped), drawn(run.framework, case)
