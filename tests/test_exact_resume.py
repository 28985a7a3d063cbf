"""A training that is stopped within epochs ends as if it had not been: the same sequences, scores, and weights bit for bit."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from launching import TOY, launch

STOPS = "SIGTERM,{rank},3,11,19,24,39,51"  # of 20 steps an epoch; after step 19 only the evaluation is left

TRAININGS: dict[str, dict[str, object]] = {
    "plain": {"optimizer": {"class": "adam"}, "evaluated": True, "losses": "several"},
    "statistics": {"layers": "statistics", "losses": "mean", "gradient_clip_global_norm": 1.0},
    "param_every_7": {
        "horovod_reduce_type": "param",
        "horovod_param_sync_step": 7,
        "layers": "statistics",
        "optimizer": {"class": "adam"},
        "evaluated": True,
    },
    "seed_offset": {"horovod_dataset_distribution": "random_seed_offset"},
    "chunks": {"chunking": {"data": 5, "classes": 5, "id": 1}, "max_seqs": 16, "shuffle_batches": True},
    "newbob": {"learning_rate_control": "newbob", "evaluated": True, "newbob_relative_error_threshold": -0.5},
}


def jobs(folder: Path, corpus: Path, size: int) -> list[dict[str, object]]:
    """Every training twice: in one go, and stopped six times, by signals to one rank."""
    made = []
    for name, overrides in TRAININGS.items():
        for how in ("whole", "stopped"):
            keys = {"use_horovod": True, "corpus": corpus, "num_epochs": 3, "model": folder / name / how / "model"}
            keys |= {"record": folder / f"{name}.{how}.ids", **overrides}
            if how == "stopped":
                keys |= {"fault": STOPS.format(rank=size - 1), "save_interval_steps": 8}
            texts = {key: str(value) for key, value in keys.items()}
            made.append({"name": f"{name}.{how}", "folder": str(folder), "overrides": texts})
    return made


@pytest.fixture(scope="module")
def results(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folders = {}
    for size in (1, 2, 3):
        folder = folders[size] = tmp_path_factory.mktemp(f"resume-{size}")
        (folder / "jobs.json").write_text(json.dumps(jobs(folder, corpus, size)))
        finished = launch([str(TOY.parent / "several.py"), str(folder / "jobs.json")], ranks=size, timeout=400)
        assert finished.status == 0, finished.err
        (folder / "out").write_text(finished.out)
    return folders


def trained_on(folder: Path, name: str, size: int) -> Counter[tuple[int, int]]:
    lines = [line for rank in range(size) for line in (folder / f"{name}.ids.{rank}").read_text().splitlines()]
    return Counter((int(line.split()[0]), int(line.split()[1])) for line in lines)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(TRAININGS))
def test_weights_are_bit_equal(results: dict[int, Path], name: str, size: int) -> None:
    for rank in range(size):
        whole, stopped = (
            torch.load(results[size] / f"{name}.{how}.rank-{rank}.pt", weights_only=True) for how in ("whole", "stopped")
        )
        assert all(torch.equal(whole[key], stopped[key]) for key in whole)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(TRAININGS))
def test_scores_sequences_and_files_are_the_same(results: dict[int, Path], name: str, size: int) -> None:
    folder = results[size]
    assert trained_on(folder, f"{name}.whole", size) == trained_on(folder, f"{name}.stopped", size)
    for rank in range(size):  # in the same order, too
        assert (folder / f"{name}.whole.ids.{rank}").read_text() == (folder / f"{name}.stopped.ids.{rank}").read_text()
    lines = {}
    for how in ("whole", "stopped"):
        lines[how] = [json.loads(line) for line in (folder / name / how / "scores.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines["stopped"]] == [1, 2, 3]
    for whole, stopped in zip(lines["whole"], lines["stopped"], strict=True):
        assert all(whole[key] == stopped[key] for key in ("scores", "steps", "global_step", "learning_rate", "padding"))
    names = [sorted(path.name for path in (folder / name / how).iterdir()) for how in ("whole", "stopped")]
    assert names[0] == names[1]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_stop_is_told_and_happens_within_the_epoch(results: dict[int, Path], size: int) -> None:
    out = (results[size] / "out").read_text()
    for name in TRAININGS:
        told = [line for line in out.splitlines() if line.startswith(f"{name}.stopped: stopped by SIGTERM in epoch")]
        assert len(told) >= 4, told
        assert all("status 75" in line for line in told)
