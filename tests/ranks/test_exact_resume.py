"""A training that is stopped within epochs ends as if it had not been: the same sequences, scores, and weights bit for bit."""

import json
from collections import Counter
from math import isfinite
from pathlib import Path

import numpy
import pytest
from launching import TOY, hvdtrain, launch

CONFIGS = {"torch": TOY, "tensorflow": TOY.with_name("tensorflow_config.py")}

RUNS = [("torch", 1), ("torch", 2), ("tensorflow", 2)]
"""Framework and number of ranks."""

STOPS = "SIGTERM,{rank},3,18,24"  # of 20 steps an epoch, in the last of which only one rank has a batch
"""A stop comes two steps after its signal: after step 5, after the first batch of an evaluation or all of an epoch, ..."""

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
    "background": {"save_in_background": True, "optimizer": {"class": "adam"}, "layers": "statistics"},
    "by_the_clock": {"save_interval_minutes": 0.0005},
    "newbob": {"learning_rate_control": "newbob", "evaluated": True, "newbob_relative_error_threshold": -0.5},
}


def jobs(folder: Path, corpus: Path, size: int) -> list[dict[str, object]]:
    """Every training twice: in one go, and stopped three times, by signals to one rank."""
    made = []
    for name, overrides in TRAININGS.items():
        for how in ("whole", "stopped"):
            keys = {"use_horovod": True, "corpus": corpus, "num_epochs": 2, "model": folder / name / how / "model"}
            keys |= {"record": folder / f"{name}.{how}.ids", **overrides}
            if how == "stopped":
                keys |= {"fault": STOPS.format(rank=size - 1), "save_interval_steps": 8}
            texts = {key: str(value) for key, value in keys.items()}
            made.append({"name": f"{name}.{how}", "folder": str(folder), "overrides": texts})
    return made


def run(folder: Path, all_jobs: list[dict[str, object]], size: int, config: Path = TOY) -> str:
    (folder / "jobs.json").write_text(json.dumps(all_jobs))
    finished = launch([str(TOY.parent / "several.py"), str(folder / "jobs.json"), config], ranks=size, timeout=600)
    assert finished.status == 0, finished.err
    return finished.out


@pytest.fixture(scope="module")
def results(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    folders = {}
    for framework, size in RUNS:
        folder = folders[framework, size] = tmp_path_factory.mktemp(f"resume-{framework}-{size}")
        (folder / "out").write_text(run(folder, jobs(folder, corpus, size), size, CONFIGS[framework]))
    return folders


def trained_on(folder: Path, name: str, size: int) -> Counter[tuple[int, int]]:
    lines = [line for rank in range(size) for line in (folder / f"{name}.ids.{rank}").read_text().splitlines()]
    return Counter((int(line.split()[0]), int(line.split()[1])) for line in lines)


@pytest.mark.parametrize("of", RUNS, ids=str)
@pytest.mark.parametrize("name", sorted(TRAININGS))
def test_weights_are_bit_equal(results: dict[tuple[str, int], Path], name: str, of: tuple[str, int]) -> None:
    for rank in range(of[1]):
        whole, stopped = (numpy.load(results[of] / f"{name}.{how}.rank-{rank}.npz") for how in ("whole", "stopped"))
        assert all(numpy.array_equal(whole[key], stopped[key]) for key in whole)


@pytest.mark.parametrize("of", RUNS, ids=str)
@pytest.mark.parametrize("name", sorted(TRAININGS))
def test_scores_sequences_and_files_are_the_same(results: dict[tuple[str, int], Path], name: str, of: tuple[str, int]) -> None:
    folder, size = results[of], of[1]
    assert trained_on(folder, f"{name}.whole", size) == trained_on(folder, f"{name}.stopped", size)
    for rank in range(size):  # in the same order, too
        assert (folder / f"{name}.whole.ids.{rank}").read_text() == (folder / f"{name}.stopped.ids.{rank}").read_text()
    lines = {}
    for how in ("whole", "stopped"):
        lines[how] = [json.loads(line) for line in (folder / name / how / "scores.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines["stopped"]] == [1, 2]
    for whole, stopped in zip(lines["whole"], lines["stopped"], strict=True):
        assert all(whole[key] == stopped[key] for key in ("scores", "steps", "global_step", "learning_rate", "padding"))
    names = [sorted(path.name for path in (folder / name / how).iterdir()) for how in ("whole", "stopped")]
    assert names[0] == names[1]


@pytest.mark.parametrize("of", RUNS, ids=str)
def test_every_stop_is_told_and_happens_within_the_epoch(results: dict[tuple[str, int], Path], of: tuple[str, int]) -> None:
    out = (results[of] / "out").read_text()
    for name in TRAININGS:
        told = [line for line in out.splitlines() if line.startswith(f"{name}.stopped: stopped by SIGTERM in epoch")]
        assert len(told) >= 2, told
        assert all("status 75" in line for line in told)


def test_another_number_of_ranks_goes_on_with_the_rest_of_the_epoch(corpus: Path, tmp_path: Path) -> None:
    """From 3 ranks to 1 in the midst of an epoch, and from there to 2: every sequence is trained on once an epoch."""
    trainings: dict[str, dict[str, object]] = {
        "grad": {"layers": "statistics"},
        "param": {"horovod_reduce_type": "param", "horovod_param_sync_step": 5, "optimizer": {"class": "adam"}},
    }
    common = {"use_horovod": True, "corpus": corpus, "num_epochs": 2, "max_seqs": 4, "evaluated": True}
    for number, (size, stop) in enumerate([(3, 4), (1, 20), (2, 0)]):
        all_jobs = []
        for name, overrides in trainings.items():
            keys = {**common, "model": tmp_path / name / "model", "record": tmp_path / f"{name}.{number}.ids", **overrides}
            keys |= {"fault": f"SIGTERM,0,{stop}"} if stop else {}
            texts = {key: str(value) for key, value in keys.items()}
            all_jobs.append({"name": name, "folder": str(tmp_path), "overrides": texts, "once": True})
        out = run(tmp_path, all_jobs, size)
        for name in trainings if stop else ():
            assert f"{name}: stopped by SIGTERM in epoch 1 after step {stop + 2};" in out
    for name in trainings:
        counted: Counter[tuple[int, int]] = Counter()
        for number, size in enumerate((3, 1, 2)):
            counted += trained_on(tmp_path, f"{name}.{number}", size)
        assert counted == {(epoch, sequence): 1 for epoch in (1, 2) for sequence in range(231)}
        lines = [json.loads(line) for line in (tmp_path / name / "scores.jsonl").read_text().splitlines()]
        assert [line["epoch"] for line in lines] == [1, 2]
        assert all(isfinite(line["scores"]["train_loss_ce"]) for line in lines)


def test_what_cannot_go_on_within_an_epoch_says_why(corpus: Path, tmp_path: Path) -> None:
    common = {"corpus": corpus, "model": tmp_path / "model", "max_seqs": 4, "use_horovod": True}
    offset = {**common, "horovod_dataset_distribution": "random_seed_offset"}
    assert hvdtrain(TOY, {**offset, "fault": "SIGUSR1,1,4"}, ranks=2).status == 75
    alone = hvdtrain(TOY, offset)
    assert alone.status == 2
    assert "expected the 2 ranks that wrote it in the midst of epoch 1, got 1" in alone.err
    for file in tmp_path.glob("model.001.step-*"):
        file.unlink()
    assert hvdtrain(TOY, {**common, "fault": "SIGUSR1,0,4"}).status == 75
    other = hvdtrain(TOY, {**common, "max_seqs": 5})
    assert other.status == 2
    assert "epoch 1: expected the batches it began with, got others after" in other.err
