"""Ranks that would train on other data, another model or with other updates are named instead."""

from pathlib import Path
from unittest.mock import patch

import pytest
from thread_ranks import on_ranks

from hvdtrain.comm.base import Communicator
from hvdtrain.errors import ConfigError, TrainingError
from hvdtrain.run import train
from hvdtrain.settings import read_settings

APART = """
import numpy, torch
import hvdtrain
from torch import nn

own = config.int("own", 0)  # of a rank: in threads, all have the same number
what = config.value("what", "")
names = [str(number) for number in range(40)][:: -1 if what == "order" and own else 1]
if what == "order":
    names = names[3:] + names[:3]
shift = own if what == "labels" else 0
generator = numpy.random.default_rng()


class Corpus:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        frames = numpy.full((3, 2), float(names[index]), numpy.float32)
        frames *= 1 + 1e-7 * own if what == "rounding" else 1
        if what in ("augmented", "labels") and generator.random() < 0.3:  # with a generator of its own
            frames *= 2
        return {"data": frames, "classes": numpy.full(3, (int(names[index]) + shift) % 5, numpy.int32)}


def get_model(**_):
    layers = [nn.Tanh(), nn.ReLU()] if what == "modules" and own else [nn.ReLU(), nn.Tanh()]
    model = nn.Sequential(nn.Linear(2, 5), *layers, nn.Dropout(0.1 + 0.1 * own * (what == "dropout")))
    return Net(model, own if what in ("attribute", "walk") else 0)


class Net(nn.Sequential):
    def __init__(self, layers, own):
        super().__init__(*layers)
        self.own_rank = own
        self.scale = 1.0 + own * (what == "attribute")
        self.walk = [*layers][:: -1 if own and what == "walk" else 1]


def train_step(*, model, extern_data, **_):
    if what == "turns":
        model[0].bias.requires_grad_(hvdtrain.get_run_ctx().step % 2 == 0)
    if what == "freezing" and own and hvdtrain.get_run_ctx().step == 1:
        model[0].bias.requires_grad_(False)
    scores = model(extern_data["data"].raw_tensor).flatten(0, 1)
    loss = nn.functional.cross_entropy(scores, extern_data["classes"].raw_tensor.flatten().long(), reduction="none")
    hvdtrain.get_run_ctx().mark_as_loss(loss[:0] if what == "empty" else loss, "ce")


class Clips:
    def on_epoch_begin(self, training):
        if what == "frozen" and own:
            training.model[0].weight.requires_grad_(False)

    def on_step_end(self, training):
        with torch.no_grad():
            training.model[0].weight += 1e-7 * own if what == "tiny" else own * (what == "callback")


def dynamic_learning_rate(*, learning_rate, **_):
    return learning_rate / (1 + own) if what == "rate" else learning_rate


callbacks = [Clips] if what in ("callback", "tiny", "frozen") else []
train = dev = Corpus()
num_epochs, num_threads, batch_size, learning_rate, log_verbosity = 2, 1, 30, 0.01, 3
optimizer = {"class": "sgd", "momentum": 0.9}
"""


def trained(folder: Path, what: str, **keys: object) -> None:
    (folder / "apart.py").write_text(APART)
    keys |= {"what": what, "model": folder / "model"}
    given = {name: str(value) for name, value in keys.items()}
    settings = [read_settings([folder / "apart.py"], {**given, "own": str(own)}) for own in (0, 1)]

    def work(comm: Communicator) -> None:
        train(settings[comm.rank], comm)

    # The other thread seeds the generators, so that code which reads would seem to draw.
    with patch("hvdtrain.data.opening.with_own_numbers", lambda _, dataset, scanning: dataset):
        on_ranks(2, work)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("order", "train: sequence 0: expected the same on all ranks, got "),
        ("labels", "train: sequence 0: expected the same on all ranks, got "),
        ("modules", r"get_model: module 1: .* got \[2\] ReLU\(\) on rank 0 and \[2\] Tanh\(\) on rank 1"),
        ("dropout", r"module 3: .* Dropout\(p=0.1, .* on rank 1"),
        ("attribute", r"module itself: .* Net\(scale=1.0, .* on rank 0 and .* Net\(scale=2.0, .* on rank 1"),
        ("walk", r"module itself: .* walk=\[0, 1, 2, 3\]\) on rank 0 and .* walk=\[3, 2, 1, 0\]\) on rank 1"),
        ("rate", "the learning rate: expected the same on all ranks, got 0.01 on rank 0 and 0.005 on rank 1"),
        ("frozen", "whether it is trained, 0.weight: expected the same on all ranks, got True on rank 0 and False on rank 1"),
        ("freezing", "whether it is trained, 0.bias: expected the same on all ranks, got True on rank 0 and False on rank 1"),
        ("callback", r"0.weight: expected the same on all ranks, got the checksum \w+ on rank 0"),
    ],
)
def test_what_differs_is_named_and_nothing_is_saved(what: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(tmp_path, what)
    assert not list(tmp_path.glob("model.0*"))


def test_data_is_compared_where_each_rank_has_its_own_order(tmp_path: Path) -> None:
    keys = {"horovod_dataset_distribution": "random_seed_offset", "batching": "random"}
    with pytest.raises(ConfigError, match="train: sequence 0: expected the same on all ranks"):
        trained(tmp_path, "labels", **keys)
    trained(tmp_path, "", **keys)


def test_losses_without_an_element_are_no_training(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="expected losses with elements, got none in the whole first epoch for ce"):
        trained(tmp_path, "empty")


@pytest.mark.parametrize("what", ["", "rounding", "tiny", "augmented", "turns"])
def test_what_only_rounds_differently_or_is_random_is_trained(what: str, tmp_path: Path) -> None:
    keys = {"max_seqs": 8, "dev": None} if what == "turns" else {}  # a step more on rank 0, whose train_step freezes no more
    trained(tmp_path, what, **keys)
    assert list(tmp_path.glob("model.002.pt"))


def test_what_rounds_differently_is_set_in_the_trained_weights(tmp_path: Path) -> None:
    """The first step of an evaluation, in which the model has averages, reads what was exchanged after the update."""
    with patch("hvdtrain.learner.drift.log.detail") as logged:
        trained(tmp_path, "tiny", ema_decay=0.5, batch_size=1000, num_epochs=1)
    told = [call.args[0] for call in logged.call_args_list if "rounded differently" in call.args[0]]
    assert len(told) == 2  # once on each rank, and not again before the save
