"""Trainings that go on without broken sequences: the same on any number of ranks, stopped or not, and never more than allowed."""

from pathlib import Path

import kaldiio
import numpy
import pytest
from launching import TOY, hvdtrain
from speech_files import write_table
from trainings import CONFIGS, Results, Run, Trained, assert_alike, assert_same, trains

KALDI = TOY.with_name("kaldi.py")
BROKEN = range(6, 12)
"""In training: on two and on three ranks, all of the first batch of the last rank."""

BROKEN_IN_DEV = [3]
RUNS = [Run("torch", "horovod", 1), Run("torch", "horovod", 2), Run("torch", "torch.distributed", 3)]
TENSORFLOW = Run("tensorflow", "horovod", 2)


def write_folders(folder: Path) -> Path:
    """Kaldi folders with features, of which some are not finite, gone or cut off; their lengths are known."""
    for part, count, broken in (("train", 30, BROKEN), ("dev", 7, BROKEN_IN_DEV)):
        target = folder / part
        if target.exists():
            continue
        target.mkdir(parents=True)
        generator = numpy.random.RandomState(count)
        features = {f"utt{n:02}": generator.rand(3 + n % 4, 4).astype(numpy.float32) for n in range(count)}
        lengths = {name: len(values) for name, values in features.items()}
        for number in broken:
            features[f"utt{number:02}"][1, 2] = numpy.nan
        classes = {name: generator.randint(0, 5, length).astype(numpy.int32) for name, length in lengths.items()}
        kaldiio.save_ark(str(target / "feats.ark"), features, scp=str(target / "feats.scp"))
        kaldiio.save_ark(str(target / "ali.ark"), classes, scp=str(target / "ali.scp"))
        table = dict(line.split() for line in (target / "feats.scp").read_text().splitlines())
        table[f"utt{broken[0]:02}"] = f"{target}/gone.ark:7"
        if len(broken) > 1:
            table[f"utt{broken[1]:02}"] = f"{target}/feats.ark:{(target / 'feats.ark').stat().st_size - 9}"
        write_table(target / "feats.scp", table)
        write_table(target / "utt2num_frames", lengths)
        write_table(target / "number", {f"utt{n:02}": n for n in range(count)})
    return folder


@trains(*RUNS, TENSORFLOW)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    keys: dict[str, object] = {
        "configs": [CONFIGS[run.framework], KALDI],
        "folder": write_folders(folder / "folders"),
        "skip_broken": len(BROKEN),
        "losses": "mean",
        "num_epochs": 2,
        "record": True,
    }
    if run == TENSORFLOW:
        return {"whole": keys}
    return {"whole": keys, "stopped": keys | {"fault": f"SIGTERM,{run.size - 1},1", "save_interval_steps": 1}}


def trained_well(results: Results, name: str) -> None:
    """All sequences but the broken ones were trained on once in every epoch, and the report says so."""
    expected = {(epoch, number): 1 for epoch in (1, 2) for number in range(30) if number not in BROKEN}
    assert dict(results.trained_on(name)) == expected
    assert [report["broken"] for report in results.reports(name)] == [len(BROKEN), len(BROKEN)]
    assert [report["num_sequences"] for report in results.reports(name)] == [30, 30]


@pytest.mark.parametrize("of", RUNS, ids=str)
def test_any_number_of_ranks_learns_the_same(trained: Trained, of: Run) -> None:
    results, alone = trained(trainings, of), trained(trainings, RUNS[0])
    trained_well(results, "whole")
    assert_alike(results.weights("whole"), alone.weights("whole"))
    for one, other in zip(results.scores("whole"), alone.scores("whole"), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("of", RUNS, ids=str)
def test_a_stop_changes_nothing(trained: Trained, of: Run) -> None:
    results = trained(trainings, of)
    trained_well(results, "stopped")
    assert "stopped by SIGTERM" in results.out("stopped")
    assert_same(results.weights("whole"), results.weights("stopped"))
    assert results.scores("whole") == results.scores("stopped")


def test_each_is_named_in_the_log(trained: Trained) -> None:
    out = trained(trainings, RUNS[1]).out("whole")
    assert "train: 6 broken sequences so far, at most 6 are left out (skip_broken)" in out
    assert "feats.scp, line 7, 'utt06': expected an array of Kaldi, got no file" in out
    assert "feats.scp, line 9, 'utt08': expected finite numbers, got nan in frame 1" in out
    assert "dev: 1 broken sequences so far" in out
    assert "train epoch 2: 6 of 30 sequences are broken and were left out" in out


def test_tensorflow(trained: Trained) -> None:
    trained_well(trained(trainings, TENSORFLOW), "whole")


def test_too_many_end_the_training_on_all_ranks(tmp_path: Path) -> None:
    keys = {"folder": write_folders(tmp_path / "folders"), "model": tmp_path / "model", "corpus": tmp_path, "losses": "mean"}
    finished = hvdtrain(TOY, keys | {"skip_broken": 5, "use_horovod": True}, ranks=3, options=[str(KALDI)])
    assert finished.status == 2
    assert "train: expected at most 5 broken sequences (skip_broken), got 6 broken: " in finished.err
    finished = hvdtrain(TOY, keys, options=[str(KALDI)])
    assert finished.status == 2
    assert "train: " in finished.err
    assert "feats.scp, line 7, 'utt06'" in finished.err
    assert "skip_broken = N lets a training go on without N of them" in finished.err
