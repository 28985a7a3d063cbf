"""The speech demo: what espeak-ng speaks becomes Kaldi folders, and the config trains on such folders."""

import json
import re
import shutil
from pathlib import Path

import pytest
from launching import ROOT, hvdtrain, launch
from speech_files import write_folder

from hvdtrain.data.opening import open_dataset
from hvdtrain.data.sources import check_dataset


def test_the_config_trains_on_kaldi_folders(tmp_path: Path) -> None:
    for part, count in (("train", 8), ("dev", 3), ("test", 3)):
        write_folder(tmp_path / part, count=count, shortest=4000)
    (tmp_path / "train" / "audio" / "utt03.wav").unlink()  # the config continues without a few
    keys = {"model": tmp_path / "model", "log": None, "speech": tmp_path, "num_epochs": 1, "max_seqs": 4, "lengths_dir": None}
    finished = hvdtrain(ROOT / "configs" / "speech.py", keys)
    assert finished.status == 0, finished.err
    [report] = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert report["num_sequences"] == 7
    assert set(report["scores"]) == {"train_loss_ctc", "dev_loss_ctc", "dev_loss_wer", "eval_loss_ctc", "eval_loss_wer"}
    assert "train: 1 broken sequences are left out" in finished.out
    assert "utt03" in finished.out


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed (apt-get install espeak-ng)")
def test_sentences_are_spoken_as_kaldi_folders_which_the_hand_written_loop_reads(tmp_path: Path) -> None:
    speak = [str(ROOT / "demos" / "speech" / "speak.py"), str(tmp_path), "--sentences", "6", "--held-out", "2"]
    finished = launch(speak)
    assert finished.status == 0, finished.err
    for part, count in (("train", 6), ("dev", 2), ("test", 2)):
        spec, problems = check_dataset("train", {"class": "KaldiFolder", "folder": str(tmp_path / part), "units": "text"}, {})
        assert spec is not None, problems
        dataset = open_dataset(spec)
        assert dataset.num_sequences == count
        assert all(len(dataset.sequence(index)["data"]) > 10_000 for index in range(count))
    loop = launch([str(ROOT / "benchmarks/loops/speech_loop.py"), str(tmp_path), "--num_epochs", "1", "--max_seqs", "2"], ranks=2)
    assert loop.status == 0, loop.err
    assert re.search(r"^epoch 1: ctc \d+\.\d+, dev wer \d\.\d+, test wer \d\.\d+, ", loop.out, re.MULTILINE)
