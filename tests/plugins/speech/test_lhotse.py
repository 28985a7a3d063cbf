"""CutSets of Lhotse: in memory, in a manifest, in Shar format; the arrays are those that Lhotse reads."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy
import opened_data
import pytest
import torch
from lhotse.utils import fastcopy
from speech_files import RATE, write_folder

from hvdtrain.data.broken import BrokenSequences
from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.errors import BrokenSequence, DataError

lhotse = pytest.importorskip("lhotse")


def opened(value: Any, limit: int = 0, folder: Path | None = None) -> Dataset:
    return opened_data.opened(value, scanning=Scanning(folder, broken=BrokenSequences("train", limit)))


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Six cuts with recordings, supervisions and stored features; the fourth begins within its recording."""
    folder = tmp_path_factory.mktemp("lhotse")
    names = list(write_folder(folder / "train", shortest=1600))
    recordings = lhotse.RecordingSet.from_recordings(
        lhotse.Recording.from_file(folder / "train" / "audio" / f"{name}.wav") for name in names
    )
    supervisions = lhotse.SupervisionSet.from_segments(
        lhotse.SupervisionSegment(id=name, recording_id=name, start=0, duration=recordings[name].duration, text=f"text {name}")
        for name in names
    )
    made = [cut.with_id(cut.recording_id) for cut in lhotse.CutSet.from_manifests(recordings, supervisions)]
    made[3] = made[3].truncate(offset=0.05, duration=0.1, preserve_id=True)
    extractor = lhotse.Fbank(lhotse.FbankConfig(sampling_rate=RATE, num_filters=20))
    return lhotse.CutSet.from_cuts(made).compute_and_store_features(extractor, folder / "features", progress_bar=False).to_eager()


def same_as_lhotse(dataset: Dataset, cuts: Any, features: Any = "feats") -> None:
    listed = list(cuts)
    assert dataset.tags(range(dataset.num_sequences)) == [cut.id for cut in listed]
    for index, cut in enumerate(listed):
        arrays = dataset.sequence(index)
        if features == "wav":
            expected = cut.load_audio().T
        else:
            expected = cut.load_features() if features == "feats" else cut.compute_features(features)
        numpy.testing.assert_array_equal(arrays["data"], expected)
        assert dataset.lengths["data"][index] == len(expected)
        texts = [segment.text for segment in sorted(cut.supervisions, key=lambda segment: float(segment.start))]
        assert arrays["classes"].tolist() == [" ".join(texts)]


def test_eager_cuts_as_they_are(cuts: Any) -> None:
    same_as_lhotse(opened(cuts), cuts)
    same_as_lhotse(opened(lambda: cuts), cuts)
    same_as_lhotse(opened({"class": "LhotseDataset", "cuts": cuts, "features": "wav"}), cuts, "wav")
    extractor = lhotse.Fbank(lhotse.FbankConfig(sampling_rate=RATE, num_filters=20))
    same_as_lhotse(opened({"class": "LhotseDataset", "cuts": cuts, "features": extractor}), cuts, extractor)
    mixed = lhotse.CutSet.from_cuts([cuts[0].mix(cuts[1], snr=10), cuts[2].pad(duration=0.5), cuts[3].append(cuts[4])])
    same_as_lhotse(opened({"class": "LhotseDataset", "cuts": mixed, "features": "wav"}), mixed, "wav")
    joined = cuts[0].append(cuts[1])
    joined.tracks = joined.tracks[::-1]
    same_as_lhotse(
        opened({"class": "LhotseDataset", "cuts": lhotse.CutSet.from_cuts([joined]), "features": "wav"}), [joined], "wav"
    )


def test_random_sound(cuts: Any) -> None:
    """Of process-wide generators, it is the same in every run; of others, that is said."""
    noise = lhotse.Fbank(lhotse.FbankConfig(sampling_rate=RATE, num_filters=20, dither=1.0))
    runs = []
    for draws in (0, 5):
        torch.rand(draws)
        dataset = opened({"class": "LhotseDataset", "cuts": cuts, "features": noise}).at_epoch(1)
        runs.append([dataset.sequence(index)["data"].tolist() for index in (2, 0)])
        dataset.close()
    assert runs[0] == runs[1]
    echo = lhotse.CutSet.from_cuts(cut.drop_features().reverb_rir() for cut in cuts)
    dataset = opened({"class": "LhotseDataset", "cuts": echo, "features": "wav"})
    assert dataset.is_stochastic
    assert "differs when it is read again" in dataset.warnings()[0]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_manifests(cuts: Any, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"cuts.{suffix}"
    cuts.to_file(path)
    lazy = lhotse.CutSet.from_jsonl_lazy(path)
    for value in (lazy, {"class": "LhotseDataset", "cuts": str(path)}):
        same_as_lhotse(opened(value, folder=tmp_path / "lengths"), cuts)
    same_as_lhotse(opened(lazy), cuts)  # without a folder for the index
    mapped = lazy.filter(lambda cut: cut.id != "utt01")
    same_as_lhotse(opened(mapped), [cut for cut in cuts if cut.id != "utt01"])

    def fail(*args: object) -> None:
        raise AssertionError("the index is kept")

    monkeypatch.setattr("hvdtrain.plugins.speech.cut_index._build", fail)
    same_as_lhotse(opened(lazy, folder=tmp_path / "lengths"), cuts)


@pytest.mark.parametrize("features", ["wav", "feats"])
def test_shar(cuts: Any, tmp_path: Path, features: str) -> None:
    (tmp_path / "shar").mkdir()
    cuts.to_shar(tmp_path / "shar", fields={"recording": "flac", "features": "numpy"}, shard_size=4, verbose=False)
    read = lhotse.CutSet.from_shar(in_dir=tmp_path / "shar")
    options = {"class": "LhotseDataset", "cuts": str(tmp_path / "shar"), "features": features}
    for _ in range(2):  # the second time from the kept index
        dataset = opened(options, folder=tmp_path / "lengths")
        same_as_lhotse(dataset, read, features)
        indices = numpy.array([5, 0, 3])
        assert dataset.batch(indices).seq_tags() == [list(cuts)[index].id for index in indices]  # type: ignore[misc]
        dataset.close()


def test_a_broken_tar_is_named(cuts: Any, tmp_path: Path) -> None:
    (tmp_path / "shar").mkdir()
    cuts.to_shar(tmp_path / "shar", fields={"recording": "wav"}, shard_size=4, verbose=False)
    tar = tmp_path / "shar" / "recording.000000.tar"
    tar.write_bytes(tar.read_bytes()[:6000])
    options = {"class": "LhotseDataset", "cuts": str(tmp_path / "shar"), "features": "wav", "units": None}
    with pytest.raises(
        BrokenSequence, match=r"cuts.000000.jsonl.gz, line 2, cut 'utt01' of .*000000.tar: expected its recording"
    ):
        opened(options)
    dataset = opened(options, limit=3)
    assert dataset.tags(range(dataset.num_sequences)) == ["utt00", "utt04", "utt05"]
    with pytest.raises(BrokenSequence, match="at most 2 broken sequences"):
        opened(options, limit=2)


def test_bad_cuts(cuts: Any, tmp_path: Path) -> None:
    listed = list(cuts)
    wrong = lhotse.CutSet.from_cuts([listed[0], listed[1].resample(16000), listed[2].drop_recording()])
    options = {"class": "LhotseDataset", "cuts": wrong, "features": "wav", "units": None}
    with pytest.raises(
        BrokenSequence, match="expected sequences that can be read, got 2 broken: .*'utt01': expected 8000 samples"
    ):
        opened(options)
    assert opened(options, limit=2).num_sequences == 1
    nameless = lhotse.CutSet.from_cuts([listed[0], listed[1].map_supervisions(lambda segment: fastcopy(segment, text=None))])
    with pytest.raises(BrokenSequence, match="'utt01': expected a text in every supervision, got none"):
        opened(nameless)
    with pytest.raises(DataError, match="one that repeats forever"):
        opened(lhotse.CutSet(lhotse.lazy.LazyRepeater(cuts)))
    path = tmp_path / "cuts.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(cuts[0].to_dict()) + '\n{"id": 3')
    with pytest.raises(DataError, match=r"cuts.jsonl.gz, line 2: expected a cut of Lhotse"):
        opened({"class": "LhotseDataset", "cuts": str(path), "features": "wav"}, limit=9)
    with pytest.raises(DataError, match="expected a manifest of cuts or a folder in Shar format, got nothing"):
        opened({"class": "LhotseDataset", "cuts": str(tmp_path / "nothing.jsonl")})
    recording = listed[0].recording
    recording.sources[0].source = str(tmp_path / "gone.wav")
    dataset = opened(lhotse.CutSet.from_cuts([listed[0].drop_features()]))
    with pytest.raises(BrokenSequence, match=r"train.cuts, cut 'utt00': expected a cut that Lhotse can read"):
        dataset.sequence(0)
