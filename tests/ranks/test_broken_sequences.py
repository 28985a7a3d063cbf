"""Trainings that continue without broken sequences: the same on any number of ranks, stopped or not, never more than allowed."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import kaldiio
import numpy
import pytest
from launching import TOY, hvdtrain
from speech_files import write_table
from trainings import Results, Run, Trained, assert_alike, assert_same, trains

KALDI = TOY.with_name("kaldi.py")
BROKEN = range(6, 12)
"""In training: on two ranks, all of the first batch of the last rank."""

BROKEN_IN_DEV = [3]
RUNS = ONE, TWO = Run("torch", "horovod", 1), Run("torch", "horovod", 2)
LOCAL: dict[str, object] = {"horovod_reduce_type": "param", "horovod_param_sync_step": 2}
BROKEN_IN_MIX = [2, 4, 6]
"""Of seven sequences of one part of a mix; the other part has none."""

LAST = range(18, 24)
"""Broken in the trainings of ranks that update alone: on two ranks, all of the last batch of the second one."""


def write_folders(folder: Path, in_train: int = 30, broken_in_train: range = BROKEN) -> Path:
    """Kaldi folders with features, of which some are not finite, gone or cut off; their lengths are known."""
    parts: list[tuple[str, int, Sequence[int]]] = [
        ("train", in_train, broken_in_train),
        ("dev", 7, BROKEN_IN_DEV),
        ("whole", 19, []),
        ("damaged", 7, BROKEN_IN_MIX),
    ]
    for part, count, broken in parts:
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
        if broken:
            table[f"utt{broken[0]:02}"] = f"{target}/gone.ark:7"
        if len(broken) > 1:
            table[f"utt{broken[1]:02}"] = f"{target}/feats.ark:{(target / 'feats.ark').stat().st_size - 9}"
        write_table(target / "feats.scp", table)
        write_table(target / "utt2num_frames", lengths)
        # The parts of a mix have the same largest number; that of the damaged part is broken.
        numbers = {"whole": [*range(count - 1), 106], "damaged": range(100, 107)}.get(part, range(count))
        write_table(target / "number", {f"utt{n:02}": number for n, number in enumerate(numbers)})
    return folder


@trains(*RUNS)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    keys: dict[str, object] = {
        "configs": [TOY, KALDI],
        "folder": write_folders(folder / "folders"),
        "skip_broken": len(BROKEN),
        "losses": "mean",
        "num_epochs": 2,
        "record": True,
    }
    made = {
        "whole": keys,
        "stopped": keys | {"fault": f"SIGTERM,{run.size - 1},1", "save_interval_steps": 1},
        "mixed": keys | {"mixed": True, "skip_broken": len(BROKEN_IN_MIX)},
    }
    if run == ONE:
        return made
    broken = write_folders(folder / "last", LAST.stop, LAST)
    without = shutil.copytree(broken, folder / "without", dirs_exist_ok=True)
    for table in [path for path in (without / "train").iterdir() if path.suffix != ".ark"]:
        table.write_text("".join(table.read_text().splitlines(keepends=True)[: LAST.start]))
    return made | {"local": keys | LOCAL | {"folder": broken}, "local without": keys | LOCAL | {"folder": without}}


def trained_well(results: Results, name: str) -> None:
    """All sequences but the broken ones were trained on once in every epoch, and the report says so."""
    expected = {(epoch, number): 1 for epoch in (1, 2) for number in range(30) if number not in BROKEN}
    assert dict(results.trained_on(name)) == expected
    assert [report["broken"] for report in results.reports(name)] == [len(BROKEN), len(BROKEN)]
    assert [report["num_sequences"] for report in results.reports(name)] == [30, 30]


@pytest.mark.parametrize("of", RUNS, ids=str)
def test_any_number_of_ranks_learns_the_same_and_a_stop_changes_nothing(trained: Trained, of: Run) -> None:
    results, alone = trained(trainings, of), trained(trainings, ONE)
    for name in ("whole", "stopped"):
        trained_well(results, name)
    assert_alike(results.weights("whole"), alone.weights("whole"))
    for one, other in zip(results.scores("whole"), alone.scores("whole"), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert "stopped by SIGTERM" in results.out("stopped")
    assert_same(results.weights("whole"), results.weights("stopped"))
    assert results.scores("whole") == results.scores("stopped")


def test_a_batch_that_is_broken_counts_in_no_average_of_models(trained: Trained) -> None:
    """The weights are bit for bit those of a training without its sequences."""
    results = trained(trainings, TWO)
    assert [report["broken"] for report in results.reports("local")] == [len(LAST), len(LAST)]
    for rank in range(2):
        assert_same(results.weights("local", rank), results.weights("local without"))
    assert results.scores("local") == results.scores("local without")


def test_each_is_named_in_the_log(trained: Trained) -> None:
    out = trained(trainings, TWO).out("whole")
    assert "train: 6 broken sequences so far, at most 6 are left out (skip_broken)" in out
    assert "feats.scp, line 7, 'utt06': expected an array of Kaldi, got no file" in out
    assert "feats.scp, line 9, 'utt08': expected finite numbers, got nan in frame 1" in out
    assert "dev: 1 broken sequences so far" in out
    assert "train epoch 2: 6 of 30 sequences are broken and were left out" in out


def test_a_broken_sequence_of_a_mix_counts_once(trained: Trained) -> None:
    """An epoch draws 19 of each part: those of the one with broken sequences two or three times."""
    alone, several = trained(trainings, ONE), trained(trainings, TWO)
    for results in (alone, several):
        used = results.trained_on("mixed")
        assert {number for _, number in used} == {*range(18), 100, 101, 103, 105, 106}
        assert {times for (_, number), times in used.items() if number < 18} == {1}
        for epoch, report in enumerate(results.reports("mixed"), 1):
            drawn = sum(times for (when, _), times in used.items() if when == epoch)
            assert report["num_sequences"] == 2 * 19
            assert report["broken"] == 2 * 19 - drawn >= 2 * len(BROKEN_IN_MIX)
        assert "train: 3 broken sequences so far, at most 3 are left out (skip_broken)" in results.out("mixed")
        assert "6 broken sequences" not in results.out("mixed")
    assert several.trained_on("mixed") == alone.trained_on("mixed")
    assert_alike(several.weights("mixed"), alone.weights("mixed"))
    for one, other in zip(several.scores("mixed"), alone.scores("mixed"), strict=True):
        assert {"train_loss_ce.whole", "train_loss_ce.damaged"} <= one.keys()
        assert one == pytest.approx(other, rel=1e-5)


def test_too_many_end_the_training_on_all_ranks(tmp_path: Path) -> None:
    keys = {"folder": write_folders(tmp_path / "folders"), "model": tmp_path / "model", "corpus": tmp_path, "losses": "mean"}
    finished = hvdtrain(TOY, keys | {"skip_broken": 5, "use_horovod": True}, ranks=2, options=[str(KALDI)])
    assert finished.status == 2
    assert "train: expected at most 5 broken sequences (skip_broken), got 6 broken: " in finished.err
    finished = hvdtrain(TOY, keys, options=[str(KALDI)])
    assert finished.status == 2
    assert "train: " in finished.err
    assert "feats.scp, line 7, 'utt06'" in finished.err
    assert "skip_broken = N lets a training continue without N of them" in finished.err
