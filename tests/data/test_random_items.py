"""Random numbers that the user's code draws while it reads: an item's depend on the seed, the epoch and the index alone."""

import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy
import pytest
import torch
from launching import TOY, hvdtrain
from opened_data import opened
from trainings import Run, Trained, assert_same, trains

from hvdtrain.data.dataset import Scanning
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.process_generators import _place_in_numpy, _place_in_torch, generator_states, seed_generators
from hvdtrain.data.types import Stream
from hvdtrain.plugins.hdf_tools.dump import main as dump

CONFIG = TOY.with_name("random_items.py")
ALL = "numpy,torch,random,gauss"
TWO = Run("torch", "horovod", 2)


def trained_alone(folder: Path, **keys: object) -> tuple[list[str], dict[str, numpy.ndarray], str]:
    """What a training noted of its items and of numbers that its steps drew, its weights, and its log."""
    folder.mkdir()
    run = hvdtrain(CONFIG, {"model": folder / "model", "record": folder / "noted", **keys})
    assert run.status == 0, run.err
    stored = torch.load(folder / "model.002.pt", weights_only=False)["model"]
    return (folder / "noted.0").read_text().splitlines(), {name: one.numpy() for name, one in stored.items()}, run.out + run.err


@pytest.mark.parametrize(
    ("keys", "noted"),
    [
        ({"around": "items"}, 0),
        ({"around": "map"}, 1),
        ({"around": "workers"}, 0),
        ({"around": "iterable"}, 0),
        ({"around": "mapped iterable"}, 1),
        ({"around": "items", "draws": "held"}, 0),
        ({"around": "map", "draws": "held"}, 1),
        ({"around": "iterable", "draws": "held"}, 0),
        ({"around": "items", "only_at": 26, "draws": "numpy,random", "cache_size": "1M"}, 1),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_two_trainings_are_equal(tmp_path: Path, keys: dict[str, object], noted: int) -> None:
    keys = {"draws": ALL, **keys}
    one, other = (trained_alone(tmp_path / name, **keys) for name in ("one", "other"))
    assert one[0] == other[0]
    assert_same(one[1], other[1])
    assert one[2].count("reading draws random numbers") == noted
    values = {(epoch, number): value for epoch, number, value, _ in map(json.loads, one[0])}
    assert len(values) == 80
    varying = [number for number in range(40) if values[1, number] != values[2, number]]
    # an iterable that does not take the epoch has its items in the same order in every epoch
    assert varying == ([26] if "only_at" in keys else list(range(1 if keys["around"] == "iterable" else 0, 40)))


class Drawn:
    """Not derived from the package's class; what it draws when it is made is the same on all ranks, too."""

    streams = {"data": Stream(numpy.dtype("float64"), (1,), 1, False)}
    lengths = {"data": numpy.ones(9, numpy.int32)}
    num_sequences, level = 9, 1.0

    def __init__(self) -> None:
        self.base = numpy.random.rand()

    def sequence(self, index: int) -> dict[str, numpy.ndarray]:
        return {"data": numpy.array([[self.base + self.level * random.random()]])}

    def tags(self, indices: Sequence[int]) -> list[str]:
        return [f"seq-{index}" for index in indices]


def test_numbers_depend_neither_on_the_order_nor_on_the_process_and_callbacks_may_change_the_object() -> None:
    objects: list[Drawn] = []

    def numbers(epoch: int, *groups: list[int], seed: int = 42) -> list[float]:
        dataset = opened({"class": lambda: objects.append(Drawn()) or objects[-1]}, scanning=Scanning(seed=seed))
        found = [made["data"].item() for group in groups for made in dataset.at_epoch(epoch).sequences(group)]
        if epoch == 1:
            objects[-1].level = 0.0
            assert dataset.at_epoch(2).sequence(5)["data"].item() == objects[-1].base
        dataset.close()
        return found

    whole = numbers(1, list(range(9)))
    assert numbers(1, [3], [8, 0]) == [whole[3], whole[8], whole[0]]
    assert len({*whole, *numbers(2, list(range(9))), *numbers(1, list(range(9)), seed=7)}) == 27


def test_a_generator_of_its_own_is_reported() -> None:
    class Items(list[int]):
        def __getitem__(self, index: Any) -> Any:
            return numpy.random.default_rng().random((3, 2))

    assert ["differs when it is read again" in line for line in opened(Items([1, 2])).warnings()] == [True]
    assert opened([numpy.ones((3, 2)), numpy.full((4, 2), numpy.nan)]).warnings() == []


@pytest.mark.parametrize("draws", [False, True])
def test_an_item_is_not_read_again_because_a_step_seeds_the_generators_meanwhile(draws: bool) -> None:
    """But what it draws before the step is noticed, though the seeding wipes it out."""
    reads: list[Any] = []
    trains = False

    class Items(list[int]):
        def __getitem__(self, index: Any) -> Any:
            reads.append(index)
            if trains:
                if draws:
                    random.random()
                step = Thread(target=seed_generators, args=(index,))
                step.start()
                step.join()
            return numpy.ones((3, 2))

    dataset = opened(Items(range(9)), scanning=Scanning(note=reads.append))
    reads.clear()
    trains = True
    dataset.sequences(range(9))
    dataset.close()
    assert dataset.is_stochastic == draws
    assert reads == list(range(9)) if not draws else reads[-1].startswith("train: reading draws random numbers")


@trains(TWO)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    keys: dict[str, object] = {"configs": [CONFIG], "draws": ALL, "draws_too": True, "record": True, "around": "items"}
    return {"whole": keys, "stopped": keys | {"stop_at": 4}}


def test_ranks_and_resumed_runs_have_the_same_items_and_dump_writes_them(tmp_path: Path, trained: Trained) -> None:
    """And what a step draws itself depends on its number and the rank."""
    made = trained(trainings, TWO)
    alone = [json.loads(line) for line in trained_alone(tmp_path / "alone", draws=ALL, around="items")[0]]
    dumped = tmp_path / "dumped.hdf"
    assert dump([str(CONFIG), str(dumped), "--epoch", "2", "++draws", ALL]) == 0
    frames = {made["number"].item(): made["data"][0, 0].item() for made in open_hdf([str(dumped)]).sequences(range(40))}
    assert frames == {number: value for epoch, number, value, _ in alone if epoch == 2}
    noted = [[json.loads(line) for line in made.needed(f"whole.ids.{rank}").read_text().splitlines()] for rank in range(2)]
    assert sorted(line[:3] for lines in noted for line in lines) == sorted(line[:3] for line in alone)
    assert not {str(line[3]) for line in noted[0]} & {str(line[3]) for line in noted[1]}
    for rank in range(2):
        assert made.needed(f"whole.ids.{rank}").read_text() == made.needed(f"stopped.ids.{rank}").read_text()
        assert_same(made.weights("whole", rank), made.weights("stopped", rank))


DRAWS: list[tuple[Callable[[], object], Callable[[], object]]] = [
    (partial(torch.rand, 1), partial(torch.randn, 1)),
    (partial(torch.rand, 1, dtype=torch.float64), partial(torch.randn, 1, dtype=torch.float64)),
    (numpy.random.rand, numpy.random.randn),
    (random.random, partial(random.gauss, 0, 1)),
]


@pytest.mark.parametrize(("uniform", "normal"), DRAWS)
def test_every_draw_changes_the_state_that_is_compared(uniform: Callable[[], object], normal: Callable[[], object]) -> None:
    for draw in (uniform, normal, normal, uniform):  # the second normal takes what the first one has left
        before = generator_states()
        assert generator_states() == before
        draw()
        assert generator_states() != before
    assert None not in (_place_in_torch(), _place_in_numpy()), "they are found by get_state, which is slow"
