"""A folder of arrays or sound with a transcript becomes an HDF file."""

import os
import wave
from pathlib import Path

import numpy
import pytest
from opened_data import opened

from hvdtrain.data.broken import BrokenSequences
from hvdtrain.data.dataset import Scanning
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.plugins.hdf_tools.dump import main
from hvdtrain.plugins.tables.folder import FolderDataset

TEXTS = {"b/two": "zwei ü", "one": "ein", "empty": ""}


def write_wav(path: Path, samples: list[int], channels: int = 1, rate: int = 8000, width: int = 2) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(b"".join(sample.to_bytes(width, "little", signed=True) for sample in samples))


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """A folder `files` with an array per tag, and a transcript next to it."""
    (tmp_path / "files" / "b").mkdir(parents=True)
    for number, tag in enumerate(TEXTS):
        numpy.save(tmp_path / "files" / f"{tag}.npy", numpy.full((number + 1, 2), number, numpy.float32))
    (tmp_path / "files" / "notes.txt").write_text("neither")
    (tmp_path / "text").write_text("".join(f"{tag} {text}\n" for tag, text in TEXTS.items()), encoding="utf-8")
    return tmp_path


def refused(**options: object) -> str:
    with pytest.raises(DataError) as caught:
        list(FolderDataset(**options))
    return str(caught.value)


def test_arrays_come_in_the_order_of_the_transcript(arrays: Path) -> None:
    dataset = FolderDataset(str(arrays / "files"), str(arrays / "text"))
    assert len(dataset) == 3
    assert [tag for tag, _ in dataset] == list(TEXTS)
    assert dataset.labels == {"classes": [" ", "e", "i", "n", "w", "z", "ü"]}
    for tag, sequence in dataset:
        assert "".join(dataset.labels["classes"][index] for index in sequence["classes"]) == TEXTS[tag]
        assert sequence["classes"].dtype == numpy.int32
    assert dataset[1][1]["data"].tolist() == [[1, 1], [1, 1]]
    assert [tag for tag, _ in dataset[1:]] == ["one", "empty"]
    found = {dataset.identity()}
    for name in ("files/b/two.npy", "text"):
        os.utime(arrays / name, (0, 0))
        found.add(dataset.identity())
    assert len(found) == 3


def test_without_a_transcript_the_files_come_by_name(arrays: Path) -> None:
    dataset = FolderDataset(str(arrays / "files"))
    assert [tag for tag, _ in dataset] == ["b/two", "empty", "one"]
    assert list(dataset[0][1]) == ["data"]


def test_a_vocabulary_says_which_class_is_which(arrays: Path) -> None:
    (arrays / "words").write_text("<unk>\nein\nzwei\n", encoding="utf-8")
    dataset = FolderDataset(str(arrays / "files"), str(arrays / "text"), str(arrays / "words"), "words")
    assert [sequence["classes"].tolist() for _, sequence in dataset] == [[2, 0], [1], []]
    assert dataset.labels == {"classes": ["<unk>", "ein", "zwei"]}
    (arrays / "characters").write_text("z\nw\ne\ni\nn\nü\n \n", encoding="utf-8")
    dataset = FolderDataset(str(arrays / "files"), str(arrays / "text"), str(arrays / "characters"))
    assert dataset[0][1]["classes"].tolist() == [0, 1, 2, 3, 6, 5]


def test_sound_becomes_floats_with_an_axis_of_channels(tmp_path: Path) -> None:
    write_wav(tmp_path / "mono.wav", [0, 16384, -32768])
    write_wav(tmp_path / "stereo.wav", [1, 2, 3, 4], channels=2)
    sequences = dict(FolderDataset(str(tmp_path)))
    assert sequences["mono"]["data"].tolist() == [[0.0], [0.5], [-1.0]]
    assert sequences["mono"]["data"].dtype == numpy.float32
    assert (sequences["stereo"]["data"] * 32768).tolist() == [[1, 2], [3, 4]]


def test_a_folder_is_converted(arrays: Path) -> None:
    source = {"class": "FolderDataset", "folder": str(arrays / "files"), "transcript": str(arrays / "text")}
    assert main([str(source), str(arrays / "out.hdf")]) == 0
    made = open_hdf([arrays / "out.hdf"])
    assert made.tags(range(3)) == list(TEXTS)
    assert made.streams["classes"].labels == (" ", "e", "i", "n", "w", "z", "ü")
    assert made.sequence(2)["data"].tolist() == [[2, 2]] * 3
    assert made.lengths["classes"].tolist() == [6, 3, 0]


def test_what_is_not_as_it_should_be(arrays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, text = str(arrays / "files"), str(arrays / "text")
    assert refused(folder=str(arrays / "none")).endswith("expected a folder of .npy or .wav files, got nothing")
    assert refused(folder=text).endswith("got a file")
    assert refused(folder=folder, transcript=str(arrays / "no")).endswith("expected a text file, got: No such file or directory")
    (arrays / "more").write_text("one x\nthree y\nfour z\n")
    assert refused(folder=folder, transcript=str(arrays / "more")) == (
        f"{arrays / 'more'}: expected a .npy or .wav file in {folder} for every tag, got none for 'three' and 1 others"
    )
    for lines, shown in (("one x\n\n", "'' in line 2"), ("one x\none y\n", "'one y' in line 2")):
        (arrays / "bad").write_text(lines)
        assert refused(folder=folder, transcript=str(arrays / "bad")).endswith(f"with a different tag on every line, got {shown}")
    (arrays / "latin").write_bytes(b"one \xfc")
    assert "expected text in UTF-8" in refused(folder=folder, transcript=str(arrays / "latin"))
    (arrays / "entries").write_text("e\ni\nn\ne\n")
    assert refused(folder=folder, transcript=text, vocabulary=str(arrays / "entries")).endswith("every entry once, got 'e' again")
    (arrays / "entries").write_text("e\ni\nn\n")
    assert "got 'z' in sequence 'b/two' (an entry <unk>" in refused(
        folder=folder, transcript=text, vocabulary=str(arrays / "entries")
    )
    with pytest.raises(ConfigError, match="units: expected 'characters' or 'words', got 'letters'"):
        FolderDataset(folder, text, units="letters")
    with pytest.raises(ConfigError, match="vocabulary: expected a transcript with it"):
        FolderDataset(folder, vocabulary=text)
    (arrays / "empty").mkdir()
    assert refused(folder=str(arrays / "empty")).endswith("expected at least one sequence, got none")
    assert main(["{'class': 'FolderDataset', 'foldr': 'x'}", str(arrays / "out.hdf")]) == 2
    assert "foldr" in capsys.readouterr().err


def test_linked_folders_and_other_spellings_of_suffixes(tmp_path: Path) -> None:
    far, near = tmp_path / "far", tmp_path / "near"
    far.mkdir()
    near.mkdir()
    numpy.save(far / "a.npy", numpy.zeros(3))
    (far / "a.npy").rename(near / "b.NPY")
    numpy.save(far / "a.npy", numpy.ones(2))
    (near / "linked").symlink_to(far)
    (near / "again").symlink_to(near)
    assert [tag for tag, _ in FolderDataset(str(near))] == ["b", "linked/a"]


def test_files_that_are_not_what_they_are_called(arrays: Path) -> None:
    folder = arrays / "files"
    write_wav(folder / "one.wav", [1])
    assert "expected one file for 'one', got one." in refused(folder=str(folder))
    (folder / "one.npy").unlink()
    write_wav(folder / "zz.wav", [1], rate=16000)
    assert refused(folder=str(folder)).endswith("zz.wav: expected 8000 samples per second as in the first file, got 16000")
    with pytest.raises(DataError, match="zz.wav: expected 8000 samples"):
        FolderDataset(str(folder))[3]  # whichever is read first
    write_wav(folder / "zz.wav", [1], width=3)
    assert refused(folder=str(folder)).endswith("zz.wav: expected a .wav file of 16-bit PCM, got 24 bits")
    (folder / "zz.wav").write_bytes(b"RIFF and nothing else")
    assert "zz.wav: expected a .wav file of 16-bit PCM, got: " in refused(folder=str(folder))
    write_wav(folder / "zz.wav", [1, 2, 3])
    (folder / "zz.wav").write_bytes((folder / "zz.wav").read_bytes()[:-2])
    assert refused(folder=str(folder)).endswith("zz.wav: expected 3 samples as its header says, got 2")
    (folder / "zz.wav").unlink()
    numpy.save(folder / "zz.npy", numpy.array([{}]))
    assert "zz.npy: expected a .npy file of numbers, got: " in refused(folder=str(folder))
    (folder / os.fsdecode(b"\xff.npy")).touch()
    assert refused(folder=str(folder)).endswith(r"expected names of files in UTF-8, got b'\xff'")


def test_the_rate_is_that_of_the_first_file_that_can_be_read(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_wav(tmp_path / f"{name}.wav", [1, 2, 3])
    (tmp_path / "a.wav").write_bytes((tmp_path / "b.wav").read_bytes()[:46])
    dataset = opened({"class": "FolderDataset", "folder": str(tmp_path)}, scanning=Scanning(broken=BrokenSequences("train", 1)))
    assert dataset.tags(range(dataset.num_sequences)) == ["b", "c"]
