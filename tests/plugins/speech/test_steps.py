"""Steps of a `map_seq`: features, augmentation, noise and tokens."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import sentencepiece
import tokenizers
from opened_data import opened
from speech_files import RATE, WORDS, sound, write_folder, write_table

from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.data.sources import check_dataset
from hvdtrain.errors import BrokenSequence, DataError
from hvdtrain.plugins.speech.log_mel import LogMel

SPEED = {"class": "SpeedPerturbation", "factors": [0.9, 1.0, 1.1]}
MEL = {"class": "LogMel", "sample_rate": RATE, "num_mels": 20}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "train", count=12)
    write_folder(tmp_path / "noise", count=3, shortest=300)
    return tmp_path


def mapped(folder: Path, steps: list[Any], kept: Path | None = None, **more: Any) -> Dataset:
    inside = {"class": "KaldiFolder", "folder": str(folder / "train"), "units": "text"}
    return opened({"class": "MapDataset", "dataset": inside, "map_seq": steps, **more}, scanning=Scanning(kept))


def noise(folder: Path) -> dict[str, Any]:
    return {"noise": {"class": "KaldiFolder", "folder": str(folder / "noise"), "units": None}}


def read(dataset: Dataset, epoch: int) -> list[numpy.ndarray]:
    """The data of all sequences of an epoch; their lengths are those that were planned."""
    of_epoch = dataset.at_epoch(epoch)
    return [of_epoch.sequence(index)["data"] for index in range(dataset.num_sequences)]


def same(one: list[numpy.ndarray], other: list[numpy.ndarray]) -> bool:
    return all(numpy.array_equal(first, second) for first, second in zip(one, other, strict=True))


def test_all_together_are_the_same_in_any_order_and_process(folder: Path) -> None:
    steps = [SPEED, {"class": "AddNoise", "share": 0.7}, lambda arrays: arrays, MEL, {"class": "SpecAugment", "time_share": 0.5}]
    dataset = mapped(folder, steps, datasets=noise(folder))
    assert dataset.streams["data"].shape == (20,)
    first, second = read(dataset, 1), read(dataset, 2)
    assert not same(first, second)
    assert [len(values) for values in first] != [len(values) for values in second]
    assert same(first, read(dataset, 1))
    of_epoch = dataset.at_epoch(2)
    assert same(second[::-1], [of_epoch.sequence(index)["data"] for index in reversed(range(12))])
    by_workers = mapped(folder, steps, datasets=noise(folder), num_workers=2)
    assert same(second, [arrays["data"] for arrays in by_workers.at_epoch(2).sequences(range(12))])
    by_workers.close()
    assert not same(first, read(mapped(folder, steps, datasets=noise(folder), map_seed=1), 1))


def test_speed(folder: Path) -> None:
    dataset = mapped(folder, [SPEED])
    inside = [len(sound(number, 800 + 80 * (number * 7 % 5))) for number in range(12)]
    factors = {
        round(before / length, 2)
        for epoch in range(1, 6)
        for before, length in zip(inside, dataset.at_epoch(epoch).lengths["data"].tolist(), strict=True)
    }
    assert factors == {0.9, 1.0, 1.1}
    for epoch in (1, 2):
        read(dataset, epoch)
    times = numpy.arange(4000) / RATE
    for factor in (0.9, 1.1, 0.5):
        for index, frequency in enumerate((0.0, 50.0, 440.0, 1500.0)):
            wave = numpy.cos(2 * numpy.pi * frequency * times).astype(numpy.float32)
            made = one_step({"class": "SpeedPerturbation", "factors": [factor]}, wave[:, None], index)[:, 0]
            assert len(made) == -(-4000 // factor)
            expected = numpy.cos(2 * numpy.pi * frequency * factor * numpy.arange(len(made)) / RATE)
            numpy.testing.assert_allclose(made[200:-200], expected[200:-200], atol=2e-3)
    high = numpy.cos(2 * numpy.pi * 3900 * times).astype(numpy.float32)  # would fold back to a lower frequency
    assert abs(one_step({"class": "SpeedPerturbation", "factors": [1.5]}, high[:, None], 0)[200:-200]).max() < 0.02


def one_step(step: dict[str, Any], data: numpy.ndarray, index: int) -> numpy.ndarray:
    items = [{"data": data}] * (index + 1)
    return opened({"class": "MapDataset", "dataset": {"class": lambda: items}, "map_seq": [step]}).sequence(index)["data"]


def test_noise_has_the_ratio(folder: Path) -> None:
    dataset = mapped(folder, [{"class": "AddNoise", "snr": [10.0, 10.0], "share": 0.5}], datasets=noise(folder))
    changed = 0
    for number, noisy in enumerate(read(dataset, 1)):
        clean = sound(number, len(noisy))[:, None]
        if not numpy.array_equal(noisy, clean):
            changed += 1
            ratio = 10 * numpy.log10(numpy.square(clean).mean() / numpy.square(noisy - clean).mean())
            assert ratio == pytest.approx(10, abs=0.01)
    assert 1 <= changed <= 11


def test_spec_augment_masks_spans(folder: Path) -> None:
    mask = {"class": "SpecAugment", "time_masks": 1, "time_frames": 3, "time_share": 1.0, "feature_masks": 0}
    mel = LogMel(sample_rate=RATE, num_mels=20)
    masked = set()
    for number, values in enumerate(read(mapped(folder, [MEL, mask]), 3)):
        plain = mel.features(sound(number, 800 + 80 * (number * 7 % 5)))
        rows = numpy.flatnonzero((values != plain).any(axis=1))
        assert len(rows) <= 3
        assert len(rows) == 0 or rows[-1] - rows[0] == len(rows) - 1
        numpy.testing.assert_allclose(values[rows], plain.mean(), rtol=1e-5)
        masked.add(len(rows))
    assert len(masked) > 1


def test_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "lines").write_text("\n".join(WORDS * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "lines"), model_prefix=str(folder / "bpe"), vocab_size=15, model_type="bpe", minloglevel=2
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "bpe.model"))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 1, "[UNK]": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    whole = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    tokenizer.enable_truncation(1)  # as of a model that takes few tokens: labels are neither cut nor filled up
    tokenizer.enable_padding(length=3)
    tokenizer.save(str(folder / "tokenizer.json"))
    for vocabulary, encode in (("bpe.model", model.encode), ("tokenizer.json", lambda text: whole.encode(text).ids)):
        step = {"class": "Tokens", "vocabulary": str(folder / vocabulary)}
        inside = {"class": "KaldiFolder", "folder": str(folder / "train"), "vocabulary": str(folder / vocabulary)}
        for dataset in (mapped(folder, [step], folder / "kept"), opened(inside)):
            for number in range(12):
                classes = dataset.sequence(number)["classes"]
                assert classes.tolist() == encode(WORDS[number % len(WORDS)])
                assert dataset.lengths["classes"][number] == len(classes)
    assert dataset.streams["classes"].labels == ("one", "two", "", "", "[UNK]")

    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [], dropout=0.5)).save(str(folder / "dropout.json"))
    with pytest.raises(DataError, match="dropout.json: expected a tokenizer without dropout, .*, got 0.5"):
        opened({**inside, "vocabulary": str(folder / "dropout.json")})

    def fail(*args: object) -> None:
        raise AssertionError("lengths are kept")

    monkeypatch.setattr("hvdtrain.plugins.speech.steps.TokensStep.apply", fail)
    mapped(folder, [step], folder / "kept")
    write_table(folder / "train" / "text", {f"utt{number:02}": "two one two" for number in range(12)})
    with pytest.raises(AssertionError, match="kept"):
        mapped(folder, [step], folder / "kept")


def test_problems(folder: Path) -> None:
    inside = {"class": "KaldiFolder", "folder": str(folder / "train"), "units": "text"}

    def keys(steps: Any, **more: Any) -> list[str]:
        _, problems = check_dataset("train", {"class": "MapDataset", "dataset": inside, "map_seq": steps, **more}, {})
        return [problem.key for problem in problems]

    assert keys([{"class": "LogMel"}, {"class": "LogMels"}, 5]) == [
        "train.map_seq.0.sample_rate",
        "train.map_seq.1",
        "train.map_seq.2",
    ]
    assert keys([{**MEL, "mels": 3}]) == ["train.map_seq.0.mels"]
    assert keys([{"class": "AddNoise"}]) == ["train.datasets"]
    assert keys([{"class": "AddNoise", "snr": [9.0, 1.0]}], datasets=noise(folder)) == ["train.map_seq.0.snr"]
    assert keys([MEL], map_lengths=lambda lengths: lengths) == ["train.map_lengths"]
    assert keys(lambda arrays: arrays, datasets=noise(folder)) == ["train.datasets"]
    assert keys([{"class": "SpeedPerturbation", "factors": [0.0]}]) == ["train.map_seq.0.factors"]
    assert keys([{"class": "Tokens"}]) == ["train.map_seq.0.vocabulary"]
    with pytest.raises(DataError, match=r"train.map_seq.0: expected a data key of data, classes, got 'sound'"):
        mapped(folder, [{**MEL, "key": "sound"}])
    with pytest.raises(DataError, match=r"train.map_seq.1: Tokens: expected texts in 'data', got float32"):
        mapped(folder, [MEL, {"class": "Tokens", "key": "data", "vocabulary": ["a"]}])
    numbers = {f"utt{number:02}": 800 + 80 * (number * 7 % 5) for number in range(12)}
    write_table(folder / "train" / "utt2num_samples", numbers)
    (folder / "train" / "audio" / "utt03.wav").write_bytes(b"")
    with pytest.raises(BrokenSequence, match="utt03.*: expected sound, got .*/utt03.wav"):  # not as a length below 0
        mapped(folder, [{"class": "Tokens", "vocabulary": sorted({unit for word in WORDS for unit in word})}])
