"""The demo: the dictionary's split, the converted files, and a few real training steps."""

from pathlib import Path

import numpy
import pytest
from launching import ROOT
from trainings import Run, Trained, trains
from words import LAST, words_in

from hvdtrain.config.references import resolve
from hvdtrain.data.hdf.dataset import open_hdf

WORDS = ROOT / "demos" / "g2p" / "words.py"


TWO = Run("torch", "horovod", 2)


@trains(slow=[TWO])
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    words = words_in(folder.parent.parent, LAST | {"train": 639})
    keys: dict[str, object] = {
        "configs": [ROOT / "configs" / "g2p.py"],
        "train.files": words / "train.hdf",
        "dev.files": words / "dev.hdf",
        "eval.files": words / "test.hdf",
        "log": folder / "train.log",
        "num_epochs": 2,
        "max_seqs": 32 // run.size,
        "num_threads": 1,
    }
    return {"demo": keys}


def test_the_split_is_stable_and_no_word_is_in_two_parts() -> None:
    dictionary = resolve(f"{WORDS}:dictionary")()
    part_of = resolve(f"{WORDS}:part_of")
    assert len(dictionary) == 124_926
    assert len({phone for variants in dictionary.values() for variant in variants for phone in variant}) == 39
    assert {part_of(word) for word in ("a", "hello", "world", "zebra", "cat", "dog")} == {"train"}
    sizes = {part: sum(part_of(word) == part for word in dictionary) for part in ("train", "dev", "test")}
    assert sizes == {"train": 112_292, "dev": 6_394, "test": 6_240}


def test_converted_sequences_are_the_words(tmp_path: Path) -> None:
    small = words_in(tmp_path, {"dev": 299})
    words = resolve(f"{WORDS}:Words")("dev")
    dataset = open_hdf([small / "dev.hdf"])
    assert dataset.num_sequences == 300
    assert {key: (stream.dim, stream.sparse) for key, stream in dataset.streams.items()} == {
        "data": (27, True),
        "classes": (39, True),
        "variants": (40, True),
    }
    assert "".join(dataset.streams["data"].labels) == "'abcdefghijklmnopqrstuvwxyz"
    tags = dataset.tags(range(300))
    for index, (tag, arrays) in zip(range(300), words, strict=False):
        assert tags[index] == tag
        assert all(numpy.array_equal(values, arrays[key]) for key, values in dataset.sequence(index).items())


@pytest.mark.slow
def test_the_config_learns_and_reports_exact_error_rates_on_two_ranks(trained: Trained) -> None:
    epochs = trained(trainings, TWO).scores("demo")
    assert epochs[1]["train_loss_ctc"] < 0.5 * epochs[0]["train_loss_ctc"]
    assert {"dev_loss_ctc", "dev_loss_per", "dev_loss_wer", "eval_loss_wer"} <= set(epochs[1])
    # whole words are counted: the rate of 300 words is a multiple of 1/300
    assert epochs[1]["dev_loss_wer"] * 300 == pytest.approx(round(epochs[1]["dev_loss_wer"] * 300), abs=1e-9)
    assert epochs[1]["dev_loss_per"] < 1.0
