"""N ranks learn what one rank learns: trainings on 1, 2 and 3 ranks of a real Horovod, compared number by number."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from launching import TOY, launch

SIZES = (1, 2, 3)

# One launch for each number of ranks; the overrides of each training by name. A global batch is 12 sequences for every
# number of ranks, so 231 sequences are 20 steps, in the last of which only one rank has a batch.
TRAININGS: dict[str, dict[str, object]] = {
    "sum": {"losses": "sum", "gradient_clip_global_norm": 50.0},
    "mean": {"losses": "mean", "gradient_clip_global_norm": 1.0, "optimizer": {"class": "adam"}},
    "several": {"losses": "several"},
    "mean_average": {"losses": "mean", "horovod_avg_grad": True},
    "grad_average": {"part": "even.hdf", "horovod_avg_grad": True, "optimizer": {"class": "sgd"}},
    "param_every_step": {"part": "even.hdf", "horovod_reduce_type": "param", "optimizer": {"class": "sgd"}},
    "param_every_7": {"horovod_reduce_type": "param", "horovod_param_sync_step": 7, "layers": "statistics", "num_epochs": 2},
    "param_by_time": {"horovod_reduce_type": "param", "horovod_param_sync_time_diff": 0.05, "layers": "statistics"},
    "grad_statistics": {"layers": "statistics", "num_epochs": 2},
    "evaluated": {"learning_rate": 0.0, "evaluated": True, "losses": "several", "max_seqs": 7},
    "by_frames": {"max_seqs": None, "batch_size": 30, "num_epochs": 2, "record": "ids"},
    "balanced": {"max_seqs": 4, "balance_ranks": 6, "num_epochs": 2, "record": "ids"},
    "ordered_alike": {"horovod_dataset_distribution": "random_seed_offset", "num_epochs": 2, "record": "ids"},
    "fewer_than_ranks": {"part": "two.hdf", "max_seqs": 1, "losses": "several", "num_epochs": 3},
    "divided": {"horovod_scale_lr": "divide"},
}


@pytest.fixture(scope="module")
def results(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A folder for each number of ranks: NAME.rank-RANK.pt, NAME/scores.jsonl, and what was printed in `out`."""
    folders = {}
    for size in SIZES:
        folder = folders[size] = tmp_path_factory.mktemp(f"ranks-{size}")
        jobs = []
        for name, overrides in TRAININGS.items():
            all_overrides = {"use_horovod": True, "corpus": corpus, "model": folder / name / "model", **overrides}
            if "record" in overrides:
                all_overrides["record"] = folder / f"{name}.ids"
            texts = {key: str(value) for key, value in all_overrides.items()}
            jobs.append({"name": name, "folder": str(folder), "overrides": texts})
        (folder / "jobs.json").write_text(json.dumps(jobs))
        finished = launch([str(TOY.parent / "several.py"), str(folder / "jobs.json")], ranks=size, timeout=300)
        assert finished.status == 0, finished.err
        (folder / "out").write_text(finished.out)
    return folders


def weights(results: dict[int, Path], size: int, name: str, rank: int = 0) -> dict[str, torch.Tensor]:
    return torch.load(results[size] / f"{name}.rank-{rank}.pt", weights_only=True)


def assert_alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    """Equal up to a tolerance relative to each tensor's largest element."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        difference = (tensor.double() - other[name].double()).abs().max().item()
        assert difference <= tolerance * tensor.double().abs().max().item(), name


def last_scores(results: dict[int, Path], size: int, name: str) -> dict[str, float]:
    return json.loads((results[size] / name / "scores.jsonl").read_text().splitlines()[-1])["scores"]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["sum", "mean", "several", "mean_average"])
def test_weights_after_20_steps_do_not_depend_on_the_number_of_ranks(results: dict[int, Path], name: str, size: int) -> None:
    one = weights(results, 1, name)
    assert_alike(one, weights(results, size, name), 1e-5)
    assert last_scores(results, size, name) == pytest.approx(last_scores(results, 1, name), rel=1e-5)
    assert json.loads((results[size] / name / "scores.jsonl").read_text())["steps"] == 20


@pytest.mark.parametrize("name", sorted(TRAININGS))
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_end_with_the_same_model(results: dict[int, Path], name: str, size: int) -> None:
    """Parameters and all buffers, bit for bit; also where an epoch's steps are no multiple of the sync interval."""
    first = weights(results, size, name)
    for rank in range(1, size):
        other = weights(results, size, name, rank)
        assert all(torch.equal(first[key], other[key]) for key in first)


def test_training_changes_the_model_and_leaves_frozen_and_unused_parameters_alone(results: dict[int, Path]) -> None:
    still, trained = weights(results, 1, "evaluated"), weights(results, 1, "sum")
    assert not torch.allclose(still["first.weight"], trained["first.weight"], rtol=1e-3)
    assert torch.equal(still["frozen"], trained["frozen"])
    assert torch.equal(still["unused"], trained["unused"])


@pytest.mark.parametrize("size", [2, 3])
def test_averaging_parameters_after_every_sgd_step_is_averaging_gradients(results: dict[int, Path], size: int) -> None:
    assert_alike(weights(results, size, "grad_average"), weights(results, size, "param_every_step"), 1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_averaging_parameters_is_not_the_same_as_training_alone(results: dict[int, Path], size: int) -> None:
    alone, together = weights(results, 1, "param_every_7"), weights(results, size, "param_every_7")
    assert not torch.allclose(alone["first.weight"], together["first.weight"], rtol=1e-3)
    assert together["norm.running_mean"].abs().max() > 0


@pytest.mark.parametrize("size", [2, 3])
def test_evaluation_gives_the_same_numbers_on_any_number_of_ranks(results: dict[int, Path], size: int) -> None:
    """To the last bit: with a learning rate of zero the models are the same."""
    one, several = last_scores(results, 1, "evaluated"), last_scores(results, size, "evaluated")
    dev = {name: value for name, value in one.items() if name.startswith("dev_")}
    assert set(dev) == {"dev_loss_ce", "dev_loss_energy", "dev_loss_first", "dev_loss_fer"}
    assert dev == {name: several[name] for name in dev}


@pytest.mark.parametrize("size", SIZES)
def test_every_sequence_is_trained_on_once_an_epoch(results: dict[int, Path], size: int) -> None:
    for name in ("by_frames", "balanced"):
        assert trained_on(results, size, name) == {(epoch, number): 1 for epoch in (1, 2) for number in range(231)}, name


@pytest.mark.parametrize("size", SIZES)
def test_with_random_seed_offset_every_rank_sees_everything_in_its_own_order(results: dict[int, Path], size: int) -> None:
    assert trained_on(results, size, "ordered_alike") == {(epoch, number): size for epoch in (1, 2) for number in range(231)}
    orders = {(results[size] / f"ordered_alike.ids.{rank}").read_text() for rank in range(size)}
    assert len(orders) == size


def trained_on(results: dict[int, Path], size: int, name: str) -> Counter[tuple[int, int]]:
    """How often each sequence was trained on in each epoch, over all ranks."""
    lines = [line for rank in range(size) for line in (results[size] / f"{name}.ids.{rank}").read_text().splitlines()]
    return Counter((int(line.split()[0]), int(line.split()[1])) for line in lines)


def test_only_rank_0_prints_and_the_scaled_learning_rate_is_told(results: dict[int, Path]) -> None:
    for size in SIZES:
        out = (results[size] / "out").read_text()
        assert out.count("Finished training in epoch") == len(TRAININGS)
        assert f"start epoch 1 global train step 0 with effective learning rate {0.01 / size:.6g} ..." in out
