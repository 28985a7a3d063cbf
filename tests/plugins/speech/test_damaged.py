"""Random damage to the files of speech: named with the file, or without effect."""

import shutil
from pathlib import Path
from typing import Any

import kaldiio
import numpy
import pytest
import soundfile
from fuzzing import cases, generator
from opened_data import opened
from speech_files import RATE, write_folder, write_table

from hvdtrain.data.broken import BrokenSequences
from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.data.opening import OpeningContext, open_dataset
from hvdtrain.data.sources import check_dataset
from hvdtrain.errors import BrokenSequence, DataError
from hvdtrain.plugins.tables.conversions import sound

CASES = cases(60)


def read(options: dict[str, Any]) -> tuple[dict[str, dict[str, numpy.ndarray]], list[str]]:
    """What can be read of a dataset, by tag, and the messages about the rest."""
    spec, problems = check_dataset("train", options, {})
    assert spec is not None, problems
    broken = BrokenSequences("train", 1000)
    try:
        dataset: Dataset = open_dataset(spec, OpeningContext(scanning=Scanning(broken=broken)))
    except DataError as error:
        return {}, [str(error)]
    arrays, messages = {}, broken.warnings()
    for index in range(dataset.num_sequences):
        [tag] = dataset.tags([index])
        try:
            arrays[tag] = dataset.sequence(index)
        except DataError as error:
            messages.append(str(error))
    return arrays, messages


def damage(path: Path, name: str, case: int) -> None:
    """Change, remove or insert some bytes."""
    content, draw = bytearray(path.read_bytes()), generator(name, case)
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(content) + 1)
        how = draw.choice(["flip", "cut", "remove", "insert"])
        if how == "flip" and place < len(content):
            content[place] ^= 1 << draw.randrange(8)
        elif how == "cut":
            del content[place:]
        elif how == "remove":
            del content[place : place + draw.randint(1, 40)]
        else:
            content[place:place] = draw.randbytes(draw.randint(1, 40))
    path.write_bytes(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Kaldi folder with flac files, an archive of features and a manifest of Lhotse."""
    folder = tmp_path_factory.mktemp("whole") / "train"
    write_folder(folder, suffix="flac")
    features = {f"utt{n:02}": numpy.random.RandomState(n).rand(5 + n, 4).astype(numpy.float32) for n in range(6)}
    kaldiio.save_ark(str(folder / "feats.ark"), features, scp=str(folder / "feats.scp"))
    for table in ("feats.scp", "wav.scp"):  # relative to the root, so that the folder can be copied
        rows = dict(line.split(maxsplit=1) for line in (folder / table).read_text().splitlines())
        write_table(folder / table, {name: path.replace(f"{folder}/", "") for name, path in rows.items()})
    write_table(folder / "utt2num_frames", {name: len(values) for name, values in features.items()})
    return folder


FILES = ["wav.scp", "text", "feats.scp", "utt2num_frames", "feats.ark", "audio/utt02.flac"]
SOUND_MAY_DIFFER = ("audio/utt02.flac", "feats.ark", "wav.scp", "feats.scp")
"""A changed number, or the name of another utterance's file, is not noticed: no file has a checksum of it."""


@pytest.mark.fuzz
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named_or_changes_nothing_else(folder: Path, tmp_path: Path, file: str) -> None:
    for case in range(CASES // len(FILES)):
        copy = tmp_path / str(case)
        shutil.copytree(folder, copy)
        damage(copy / file, file, case)
        options = {"class": "KaldiFolder", "units": "text", "data_keys": {"feats": ("feats.scp", "kaldi_ark")}}
        whole, _ = read({**options, "folder": str(folder), "root": str(folder)})
        found, messages = read({**options, "folder": str(copy), "root": str(copy)})
        shutil.rmtree(copy)
        assert len(whole) == 6
        if found.keys() != whole.keys():
            assert any(str(copy) in message for message in messages), messages
        for name in found.keys() & whole.keys():
            for key in ("data", "feats", "classes"):
                same = numpy.array_equal(found[name][key], whole[name][key])
                assert same or file in SOUND_MAY_DIFFER or (file == "text" and key == "classes"), (name, key)


FORMATS = "WAV WAVEX RF64 W64 AIFF AU NIST CAF FLAC OGG MP3".split()


@pytest.mark.parametrize("kind", FORMATS)
def test_sound_that_was_cut_off_is_refused_whatever_its_format(tmp_path: Path, kind: str) -> None:
    """libsndfile reads what there is of most of them, as if that was all."""
    folder = tmp_path / "train"
    whole = write_folder(folder, 2, shortest=16000)["utt00"][:, None]
    paths = [folder / "audio" / f"utt0{number}.{kind.lower()}" for number in range(2)]
    for path in paths:
        soundfile.write(path, whole, RATE, format=kind, subtype="VORBIS" if kind == "OGG" else None)
    write_table(folder / "wav.scp", {path.stem: path for path in paths})
    value = {"class": "KaldiFolder", "folder": str(folder), "vocabulary_from": str(folder / "text")}
    assert len(opened(value).sequence(1)["data"]) == len(sound(None)(paths[1].read_bytes(), "")) >= 16000
    content = paths[1].read_bytes()
    paths[1].write_bytes(content[: len(content) * 6 // 10])
    with pytest.raises(DataError, match="utt01"):
        opened(value).sequence(1)
    with pytest.raises(DataError, match="^there: expected"):
        sound(None)(paths[1].read_bytes(), "there")


def test_lhotse_fills_in_nothing_of_a_file_that_was_cut_off(tmp_path: Path) -> None:
    lhotse = pytest.importorskip("lhotse")
    write_folder(tmp_path, 2)
    path = tmp_path / "audio" / "utt01.wav"
    recordings = lhotse.RecordingSet.from_recordings(map(lhotse.Recording.from_file, (path.with_name("utt00.wav"), path)))
    path.write_bytes(path.read_bytes()[:-20])
    cuts = lhotse.CutSet.from_manifests(recordings)
    for some in (cuts, cuts.to_eager().pad(duration=2.0)):
        dataset = opened({"class": "LhotseDataset", "cuts": some, "units": None})
        with pytest.raises(BrokenSequence, match=r"cut .*: expected a whole sound file, got .*utt01.wav: sound of .* bytes"):
            dataset.sequence(1)


@pytest.mark.fuzz
def test_a_damaged_tar_or_manifest_is_named(folder: Path, tmp_path: Path) -> None:
    lhotse = pytest.importorskip("lhotse")
    paths = sorted((folder / "audio").glob("*.flac"))
    recordings = lhotse.RecordingSet.from_recordings(map(lhotse.Recording.from_file, paths))
    cuts = lhotse.CutSet.from_manifests(recordings)
    (tmp_path / "shar").mkdir()
    cuts.to_shar(tmp_path / "shar", fields={"recording": "flac"}, verbose=False)
    options = {"class": "LhotseDataset", "features": "wav", "units": None}
    whole, _ = read({**options, "cuts": str(tmp_path / "shar")})
    assert len(whole) == len(paths)
    for case in range(CASES // 4):
        for file in ("recording.000000.tar", "cuts.000000.jsonl.gz"):
            copy = tmp_path / f"{case}"
            shutil.copytree(tmp_path / "shar", copy)
            damage(copy / file, file, case)
            found, messages = read({**options, "cuts": str(copy)})
            shutil.rmtree(copy)
            if found.keys() != whole.keys():
                assert any(str(copy) in message for message in messages), messages
