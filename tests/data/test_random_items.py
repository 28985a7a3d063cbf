"""Random numbers that the user's code draws while it reads: an item's depend on the seed, the epoch and the index alone."""

import json
from pathlib import Path

import numpy
import pytest
import torch
from launching import TOY, hvdtrain
from trainings import Run, Trained, assert_same, trains

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
        ({"around": "items", "cache_size": "1M"}, 0),
        ({"around": "items", "only_at": 26, "draws": "numpy,random"}, 1),
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


@trains(TWO)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    keys: dict[str, object] = {"configs": [CONFIG], "draws": ALL, "draws_too": True, "record": True, "around": "items"}
    return {"whole": keys, "stopped": keys | {"stop_at": 4}}


def test_ranks_and_resumed_runs_have_the_same_items(tmp_path: Path, trained: Trained) -> None:
    """And what a step draws itself depends on its number and the rank."""
    made = trained(trainings, TWO)
    alone = [json.loads(line) for line in trained_alone(tmp_path / "alone", draws=ALL, around="items")[0]]
    noted = [[json.loads(line) for line in made.needed(f"whole.ids.{rank}").read_text().splitlines()] for rank in range(2)]
    assert sorted(line[:3] for lines in noted for line in lines) == sorted(line[:3] for line in alone)
    assert not {str(line[3]) for line in noted[0]} & {str(line[3]) for line in noted[1]}
    for rank in range(2):
        assert made.needed(f"whole.ids.{rank}").read_text() == made.needed(f"stopped.ids.{rank}").read_text()
        assert_same(made.weights("whole", rank), made.weights("stopped", rank))
