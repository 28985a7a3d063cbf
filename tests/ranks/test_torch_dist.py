"""torch.distributed learns what Horovod learns, and its ranks find each other however they are started."""

import json
from pathlib import Path

import numpy
import pytest
import torch
from launching import TOY, hvdtrain, launch, torchrun

RANKS = 3
STATISTICS = {"layers": "statistics", "num_epochs": 2}
EQUAL = {
    "min_seq_length": {"data": 6},
    "max_seq_length": {"data": 6},
}  # no padding: BatchNorm counts it, and ranks pad differently

# The overrides of each training by name; for torch.distributed, what stands in its dict instead of the horovod_ keys.
TRAININGS: dict[str, tuple[dict[str, object], dict[str, object], dict[str, object]]] = {
    "sum": ({"losses": "sum", "gradient_clip_global_norm": 50.0}, {}, {}),
    "mean": ({"losses": "mean", "optimizer": {"class": "adam"}, "evaluated": True}, {}, {}),
    "several": ({"losses": "several"}, {}, {}),
    "average": ({"losses": "mean"}, {"horovod_avg_grad": True}, {"avg_grad": True}),
    "statistics": (STATISTICS, {}, {}),
    "param_every_7": (
        STATISTICS,
        {"horovod_reduce_type": "param", "horovod_param_sync_step": 7},
        {"reduce_type": "param", "param_sync_step": 7},
    ),
    "inherited": ({}, {"horovod_reduce_type": "param", "horovod_param_sync_step": 4}, {}),
    "everything_everywhere": (
        {"num_epochs": 2},
        {"horovod_dataset_distribution": "random_seed_offset", "horovod_scale_lr": "divide"},
        {"dataset_distribution": "random_seed_offset", "scale_lr": "divide"},
    ),
    "fewer_than_ranks": ({"part": "two.hdf", "max_seqs": 1, "losses": "several", "num_epochs": 3}, {}, {}),
    "synchronized": ({"layers": "only_statistics", **EQUAL, "sync_batch_norm": True}, {}, {}),
    "total": ({"max_seqs": None, "max_seqs_total": 12, "losses": "mean", "gradient_clip_global_norm": 1.0}, {}, {}),
    "unsynchronized": ({"layers": "only_statistics", **EQUAL}, {}, {}),
    "sharded": ({"num_epochs": 2, "optimizer": {"class": "adam"}, "gradient_clip_global_norm": 5.0}, {}, {"sharded": True}),
    "sharded_decayed": ({"optimizer": {"class": "adagrad", "weight_decay": 0.01}}, {}, {"sharded": True}),
}


@pytest.fixture(scope="module")
def results(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each transport, and one for a single process: NAME.rank-RANK.pt and NAME/scores.jsonl."""
    folders = {}
    for transport in ("use_horovod", "torch_distributed", "alone"):
        folder = folders[transport] = tmp_path_factory.mktemp(transport)
        jobs = []
        for name, (common, horovod, entries) in TRAININGS.items():
            overrides = {"corpus": corpus, "model": folder / name / "model", **common}
            if transport == "torch_distributed":
                overrides |= {"torch_distributed": entries, **({} if entries else horovod)}
            else:
                overrides |= {**horovod, "use_horovod": transport == "use_horovod"}
            texts = {key: str(value) for key, value in overrides.items()}
            jobs.append({"name": name, "folder": str(folder), "overrides": texts})
        (folder / "jobs.json").write_text(json.dumps(jobs))
        arguments = [str(TOY.parent / "several.py"), str(folder / "jobs.json")]
        if transport == "torch_distributed":
            finished = torchrun(arguments, RANKS, timeout=300)
        else:
            finished = launch(arguments, RANKS if transport == "use_horovod" else None, timeout=300)
        assert finished.status == 0, finished.err
    return folders


def weights(results: dict[str, Path], transport: str, name: str, rank: int = 0) -> dict[str, torch.Tensor]:
    with numpy.load(results[transport] / f"{name}.rank-{rank}.npz") as stored:
        return {key: torch.from_numpy(stored[key]) for key in stored}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest, relative to each tensor's largest element."""
    assert one.keys() == other.keys()
    pairs = [(one[name].double(), other[name].double()) for name in one if one[name].abs().max() > 0]
    return max(((left - right).abs().max() / left.abs().max()).item() for left, right in pairs)


def scores(results: dict[str, Path], transport: str, name: str) -> list[dict[str, float]]:
    return [json.loads(line)["scores"] for line in (results[transport] / name / "scores.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", sorted(TRAININGS))
def test_the_same_losses_and_weights_as_with_horovod(results: dict[str, Path], name: str) -> None:
    for one, other in zip(scores(results, "use_horovod", name), scores(results, "torch_distributed", name), strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    assert difference(weights(results, "use_horovod", name), weights(results, "torch_distributed", name)) < 1e-5


@pytest.mark.parametrize("name", sorted(TRAININGS))
def test_all_ranks_end_with_the_same_model(results: dict[str, Path], name: str) -> None:
    first = weights(results, "torch_distributed", name)
    for rank in range(1, RANKS):
        other = weights(results, "torch_distributed", name, rank)
        assert all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("transport", ["use_horovod", "torch_distributed"])
def test_with_synchronized_batch_norm_ranks_learn_what_one_learns(results: dict[str, Path], transport: str) -> None:
    alone = weights(results, "alone", "synchronized")
    assert difference(alone, weights(results, transport, "synchronized")) < 1e-4
    assert difference(alone, weights(results, transport, "unsynchronized")) > 1e-2


@pytest.mark.parametrize("transport", ["use_horovod", "torch_distributed"])
def test_with_a_total_batch_ranks_learn_what_one_learns(results: dict[str, Path], transport: str) -> None:
    assert difference(weights(results, "alone", "total"), weights(results, transport, "total")) < 1e-5
    assert scores(results, "alone", "total")[-1] == pytest.approx(scores(results, transport, "total")[-1], rel=1e-5)


def test_a_sharded_training_goes_on_with_any_number_of_ranks(corpus: Path, tmp_path: Path) -> None:
    """One epoch alone, one on two ranks, one on three, against three epochs alone; sharded where there are several."""
    common = {"corpus": corpus, "optimizer": {"class": "adam"}, "losses": "mean", "learning_rate": 0.002}
    for ranks in (1, 2, 3):
        arguments = ["-m", "hvdtrain", str(TOY)]
        for name, value in {**common, "model": tmp_path / "chain/model", "num_epochs": ranks}.items():
            arguments += [f"++{name}", str(value)]
        entries = {"sharded": True}
        finished = launch(arguments) if ranks == 1 else torchrun([*arguments, "++torch_distributed", str(entries)], ranks)
        assert finished.status == 0, finished.err
    assert hvdtrain(TOY, {**common, "model": tmp_path / "alone/model", "num_epochs": 3}).status == 0
    chain, alone = (torch.load(tmp_path / name / "model.003.pt", weights_only=True)["model"] for name in ("chain", "alone"))
    assert difference(chain, alone) < 1e-5
    chain, alone = (torch.load(tmp_path / name / "model.003.opt.pt", weights_only=True) for name in ("chain", "alone"))
    assert chain["optimizer"]["state"].keys() == alone["optimizer"]["state"].keys()
    assert chain["optimizer"]["param_groups"] == alone["optimizer"]["param_groups"]


@pytest.mark.parametrize("transport", ["use_horovod", "torch_distributed"])
def test_collectives(tmp_path: Path, transport: str) -> None:
    arguments = [str(TOY.parent / "collectives.py"), transport, str(tmp_path)]
    finished = launch(arguments, RANKS) if transport == "use_horovod" else torchrun(arguments, RANKS)
    assert finished.status == 0, finished.err
    assert sorted(path.name for path in tmp_path.glob("*.ok")) == ["0.ok", "1.ok", "2.ok"]
