"""`--dry-run`: what a training would do, without leaving a trace."""

import re
from pathlib import Path

import numpy
import pytest
from launching import TOY, Finished, hvdtrain, torchrun

from hvdtrain.data.plan.batch_keys import Limits
from hvdtrain.data.plan.bounds import bounds
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.plugins.trial.dry_run import Rounds

WRITES = {"use_tensorboard": True, "save_interval_steps": 1, "evaluated": True}
"""Keys with which a training writes files, in addition to those of `would_write`."""


def plan_of(*batches: list[int]) -> Plan:
    sizes = [len(batch) for batch in batches]
    return Plan(numpy.concatenate(batches).astype(numpy.int64), numpy.cumsum([0, *sizes]))


def test_the_largest_rounds_come_first() -> None:
    # Batches of sequences of 1 to 9 frames; rounds of two, the last of which is incomplete.
    lengths = {"data": numpy.arange(10, dtype=numpy.int32)}
    plan = plan_of([1, 2], [3, 3, 3, 3], [9], [1], [2, 2, 2], [1])
    rounds = Rounds(plan_of(*[[1, 2], [3, 3, 3, 3], [9], [1], [8, 8, 8]]), lengths, 2)
    assert len(rounds) == 3
    assert rounds.costs.tolist() == [12, 9, 24]
    assert rounds.largest() == [0, 1], "the round that not all ranks have a batch in stays away"
    assert rounds.describe(0) == "4 sequences, padded frames: 12 of data"
    assert [rounds.only([1, 0]).batch(i).tolist() for i in range(4)] == [[9], [1], [1, 2], [3, 3, 3, 3]]
    assert Rounds(plan, lengths, 1).largest() == [1, 2]
    assert Rounds(plan, lengths, 8).largest() == [0], "the only round"
    assert Rounds(plan, lengths, 8).only([0]).num_batches == 6


def test_a_spread_stands_for_the_epoch() -> None:
    generator = numpy.random.default_rng(1)
    lengths = {"data": generator.integers(1, 200, 5000).astype(numpy.int32)}
    order = generator.permutation(5000).astype(numpy.int64)
    rounds = Rounds(Plan(order, bounds(lengths, order, Limits(2000, None, None, None))), lengths, 2)
    chosen = rounds.spread(8)
    assert len(set(chosen)) == 8
    assert rounds.costs[chosen].tolist() == sorted(rounds.costs[chosen])
    assert rounds.costs[chosen].mean() == pytest.approx(rounds.costs.mean(), rel=0.01)
    assert sorted(rounds.spread(10**6)) == list(range(rounds.plan.num_batches // 2))


def would_write(folder: Path) -> dict[str, object]:
    """Keys that have a training write everything it can write, into a folder."""
    return WRITES | {
        "model": folder / "exp" / "model",
        "log": folder / "train.log",
        "metrics_file": folder / "numbers.prom",
        "learning_rate_file": folder / "rates",
        "trace_sequences": folder / "trace" / "t",
        "horovod_timeline": folder / "timeline.json",
        "cache_dir": folder / "copies",
        "running_average": 2,
        "average_checkpoints": "{'last': 1}",
    }


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Everything in a folder, with the time of its last change."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def check_estimate(ended: Finished, ranks: int) -> None:
    assert ended.status == 0, ended.err
    assert re.search(r"^dry run: largest batch: \d+ sequences, padded frames: \d+ of data", ended.out, flags=re.M)
    steps = {None: 20, 1: 20, 2: 20}[ranks]
    assert re.search(rf"^estimate: train: [\d.e-]+ s \({steps} steps of [\d.e-]+ s", ended.out, flags=re.M), ended.out
    assert re.search(r"^estimate: dev: [\d.e-]+ s \(\d+ steps? of [\d.e-]+ s", ended.out, flags=re.M), ended.out
    assert re.search(rf"^estimate: an epoch on {ranks} ranks?: [\d.e-]+ s, without", ended.out, flags=re.M), ended.out
    assert re.search(r"^estimate: padding: data [\d.]+%, classes [\d.]+%", ended.out, flags=re.M)
    memory = re.search(r"^estimate: memory: ([\d.]+) (MB|GB)", ended.out, flags=re.M)
    assert memory
    assert re.search(r"^estimate: checkpoint: [\d.]+ (KB|bytes): model [\d.]+", ended.out, flags=re.M), ended.out
    assert "finished after" not in ended.out, "no line of a real epoch"
    assert "score:" not in ended.out


def test_nothing_is_written(corpus: Path, tmp_path: Path) -> None:
    before = contents(corpus)
    log = {"log": [str(tmp_path / "train.log"), "stdout"], "log_verbosity": [1, 4]}
    keys = {**would_write(tmp_path), **log, "max_seqs": None, "max_seqs_total": 12, "predict_ranks": "1,64,3"}
    ended = hvdtrain(TOY, {"corpus": corpus, **keys}, options=["--dry-run"])
    check_estimate(ended, 1)
    assert re.search(r"^predict: +3\* +param, H = 16 +[\d.e+]+ +[\d.]+ +[\d.e-]+ ms +\d+% +unknown  ", ended.out, re.M), ended.out
    assert "predict: the network was not measured, as there is one rank" in ended.out
    assert re.search("^predict: 64 ranks: not predicted, .* at least one sequence for each of 64 ranks, got 12$", ended.out, re.M)
    assert "model: 155 parameters" in ended.out
    assert ", running average 1.2 KB" in ended.out, "sums of 152 parameters in float64"
    assert list(tmp_path.iterdir()) == []
    assert contents(corpus) == before


@pytest.mark.slow
def test_on_two_ranks_with_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    """The checkpoint is of one rank."""
    keys = {"corpus": corpus, **would_write(tmp_path)}
    keys = {name: value for name, value in keys.items() if name not in ("cache_dir", "horovod_timeline")}
    trained = hvdtrain(TOY, keys)
    assert trained.status == 0, trained.err
    before = contents(tmp_path)
    assert len(before) > 6
    of_two = {**keys, "use_horovod": True, "num_epochs": 3, "horovod_timeline": tmp_path / "t"}
    ended = hvdtrain(TOY, of_two, 2, options=["--dry-run"])
    check_estimate(ended, 2)
    assert "training continues after epoch 1" in ended.out
    assert "; 2 epochs: " in ended.out
    done = hvdtrain(TOY, keys, options=["--dry-run"])
    assert "Already trained until final epoch 1, nothing to do" in done.out
    assert "estimate" not in done.out
    assert contents(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("reduce_type", ["grad", pytest.param("param", marks=pytest.mark.again)])
def test_with_torchrun(corpus: Path, tmp_path: Path, reduce_type: str) -> None:
    keys = {"corpus": corpus, "torch_distributed": {"reduce_type": reduce_type}, **would_write(tmp_path)}
    keys = {**keys}
    keys.pop("horovod_timeline")
    arguments = ["-m", "hvdtrain", str(TOY), "--dry-run"]
    for name, value in keys.items():
        arguments += [f"++{name}", str(value)]
    check_estimate(torchrun(arguments, 2), 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_with_tensorflow(corpus: Path, tmp_path: Path) -> None:
    config = TOY.with_name("tensorflow_config.py")
    keys = {"corpus": corpus, "use_horovod": True, **would_write(tmp_path)}
    check_estimate(hvdtrain(config, keys, 1, options=["--dry-run"]), 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_mistakes_are_reported_as_in_training(corpus: Path, tmp_path: Path) -> None:
    keys = {"corpus": corpus, "model": tmp_path / "exp" / "model", "use_horovod": True, "fault": "['raise', 1, 3]"}
    ended = hvdtrain(TOY, {**keys, "horovod_dataset_distribution": "random_seed_offset"}, 2, options=["--dry-run"])
    assert ended.status == 1
    assert "rank 1 of 2: RuntimeError: planted by the test\n" in ended.err


def test_a_model_folder_that_cannot_be(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "exp").write_text("a file")
    ended = hvdtrain(TOY, {"corpus": corpus, "model": tmp_path / "exp" / "sub" / "model"}, options=["--dry-run"])
    assert (ended.status, "model: expected a folder that can be written to, got " in ended.err) == (2, True), ended.err


@pytest.mark.parametrize("slow", ["compute", "data"])
def test_what_a_step_takes(corpus: Path, tmp_path: Path, slow: str) -> None:
    """A tenth of a second in every step, or in reading every batch, which runs in parallel with computing."""
    keys = {"corpus": corpus, "model": tmp_path / "model", "slow": f"['{slow}', -1]"}
    ended = hvdtrain(TOY, keys, options=["--dry-run"])
    assert ended.status == 0, ended.err
    found = re.search(
        r"^estimate: train: ([\d.]+) s \(20 steps of ([\d.]+) s(?:, held up by reading, ([\d.]+) s each)?\)", ended.out, re.M
    )
    assert found, ended.out
    seconds, step, reading = found.groups()
    assert (reading is None) == (slow == "compute")
    assert 0.09 < float(reading or step) < 0.25
    assert float(seconds) == pytest.approx(20 * float(reading or step), rel=0.05)  # of two and of three digits
