"""A folder of .npy or .wav files with a transcript, each a sequence."""

from __future__ import annotations

import os
import wave
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy

from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.plugins.speech.vocabulary import LOOKED_AT, Units, Vocabulary, read_lines, read_vocabulary, split
from hvdtrain.plugins.speech.wav import damage_of_file
from hvdtrain.plugins.tables.conversions import check_units, load_npy
from hvdtrain.plugins.tables.shards import Shards

SUFFIXES = (".npy", ".wav")


class FolderDataset(Shards):
    """Files named by tag, in the order of the transcript; without one, in the order of their names.

    A tag is the path of a file in the folder without its suffix. The data key 'data' holds the array of the file, or 16-bit PCM
    sound as float32 from -1 to 1 of shape (samples, channels). The data key 'classes' holds the transcript.

    Lengths are unknown until the files are read, so it is best converted once with hvdtrain dump.

    Args:
        folder: the folder of the files, which may be in subfolders.
        transcript: a text file with lines `tag text`.
        vocabulary: a text file with one entry per line, the first is class 0; `<unk>` stands for everything else. Without it the
            classes are the units of the transcript in alphabetical order: not the same in training and development data.
        units: whether an entry is a character of the text, or a word between spaces.

    Attributes:
        labels: the entries of the vocabulary, by data key.

    Raises:
        DataError: a file is missing or not as described here.
    """

    def __init__(
        self,
        folder: str,
        transcript: str | None = None,
        vocabulary: str | None = None,
        units: Units = "characters",
    ) -> None:
        check_units(units, "FolderDataset")
        self._files = _files(Path(folder))
        self._transcript = transcript
        self._texts: dict[str, list[str]] = {}
        self._vocabulary = Vocabulary("", [])
        self._rate: int | None = None
        self.labels: dict[str, list[str]] = {}
        self._names = sorted(self._files)
        if transcript is None:
            if vocabulary is not None:
                raise ConfigError.of("missing", "vocabulary: expected a transcript with it, got none in the FolderDataset")
        else:
            self._texts = _read_transcript(Path(transcript), units)
            self._names = list(self._texts)
            missing = [tag for tag in self._names if tag not in self._files]
            if missing:
                raise DataError(
                    f"{transcript}: expected a .npy or .wav file in {folder} for every tag, got none for {missing[0]!r}"
                    + (f" and {len(missing) - 1} others" if len(missing) > 1 else "")
                )
            if vocabulary is not None:
                self._vocabulary = read_vocabulary(Path(vocabulary))
            else:
                self._vocabulary = Vocabulary(transcript, sorted({unit for text in self._texts.values() for unit in text}))
            for tag, text in self._texts.items():
                self._vocabulary.check(text, transcript, tag)
            self.labels = {"classes": self._vocabulary.entries}
        if not self._names:
            raise DataError(f"{transcript or folder}: expected at least one sequence, got none")

        tags = numpy.array([tag.encode("utf-8") for tag in self._names])
        super().__init__([folder], [len(self._names)], [tags])

    def row(self, shard: int, row: int) -> dict[str, Array]:
        tag = self._names[row]
        arrays = {"data": self._read(self._files[tag])}
        if tag in self._texts:
            arrays["classes"] = self._vocabulary.classes(self._texts[tag])
        return arrays

    def files(self) -> Sequence[str]:
        return [str(self._files[tag]) for tag in self._names] + ([] if self._transcript is None else [self._transcript])

    def warnings(self) -> list[str]:
        text = self._vocabulary.misfit(list(self._texts.values())[:LOOKED_AT])
        return [f"'classes': {text}"] if text else []

    def _read(self, path: Path) -> Array:
        if path.suffix.lower() == ".npy":
            return load_npy(path, str(path))
        rate, values = _read_sound(path)
        if self._rate is None:  # that of the first file that can be read, so that it does not matter which one is read first
            for first in [self._files[tag] for tag in self._names if self._files[tag].suffix.lower() == ".wav"]:
                with suppress(DataError):
                    self._rate = rate if first == path else _read_sound(first)[0]
                    break
        if rate != self._rate:
            raise DataError(f"{path}: expected {self._rate} samples per second as in the first file, got {rate}")
        return values


def _files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise DataError(f"{folder}: expected a folder of .npy or .wav files, got {'a file' if folder.exists() else 'nothing'}")
    files: dict[str, Path] = {}
    for path in _walk(folder):
        if path.suffix.lower() in SUFFIXES and path.is_file():
            tag = path.relative_to(folder).with_suffix("").as_posix()
            try:
                tag.encode("utf-8")
            except UnicodeEncodeError:
                raise DataError(f"{folder}: expected names of files in UTF-8, got {os.fsencode(tag)!r}") from None
            if tag in files:
                raise DataError(f"{folder}: expected one file for {tag!r}, got {files[tag].name} and {path.name}")
            files[tag] = path
    return files


def _walk(folder: Path) -> Iterator[Path]:
    """The files below a folder, also those below linked folders, each of which is entered once. (Path.rglob leaves these out.)"""
    entered = {os.path.realpath(folder)}
    for root, folders, names in os.walk(folder, followlinks=True):
        real = {name: os.path.realpath(os.path.join(root, name)) for name in folders}
        folders[:] = [name for name in folders if real[name] not in entered]
        entered |= {real[name] for name in folders}
        yield from (Path(root, name) for name in names)


def _read_transcript(path: Path, units: Units) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {}
    for number, line in enumerate(read_lines(path), start=1):
        tag, _, text = line.strip().partition(" ")
        if not tag or tag in texts:
            raise DataError(f"{path}: expected `tag text` with a different tag on every line, got {line[:80]!r} in line {number}")
        texts[tag] = split(text, units)
    return texts


def _read_sound(path: Path) -> tuple[int, Array]:
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate, samples = file.getparams()[:4]
            stored = file.readframes(samples)
    except (OSError, EOFError, wave.Error) as error:
        raise DataError(f"{path}: expected a .wav file of 16-bit PCM, got: {error}") from None
    if width != 2:
        raise DataError(f"{path}: expected a .wav file of 16-bit PCM, got {8 * width} bits")
    if len(stored) != samples * channels * width:
        raise DataError(f"{path}: expected {samples} samples as its header says, got {len(stored) // (channels * width)}")
    if problem := damage_of_file(path):
        raise DataError(f"{path}: expected a whole .wav file, got {problem}")
    # As floats with a channel axis: RETURNN would take integers without one for class indices.
    return rate, (numpy.frombuffer(stored, "<i2").astype(numpy.float32) / 32768).reshape(samples, channels)
