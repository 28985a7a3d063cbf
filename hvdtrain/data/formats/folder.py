"""A folder of .npy or .wav files with a transcript, as a source of sequences to convert.

Text becomes class indices by a vocabulary, a list of entries: the class of an entry is its index in the list.
"""

from __future__ import annotations

import os
import wave
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy

from hvdtrain.data.files import text_lines
from hvdtrain.data.formats.wav import damage_of_file
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError, DataError

Units = Literal["characters", "words"]

UNKNOWN = "<unk>"
"""The entry of a vocabulary that stands for everything that is not in it."""


class Vocabulary:
    """The entries by class.

    Args:
        where: the file it comes from, for messages.
    """

    def __init__(self, where: str, entries: Sequence[str]) -> None:
        self._where = where
        self.entries = list(entries)
        self._classes = {entry: number for number, entry in enumerate(entries)}

    def misfit(self, texts: Iterable[Sequence[str]]) -> str:
        """What to say if most units of some texts are not in the vocabulary; '': nothing."""
        counts = Counter(unit for units in texts for unit in units)
        unknown = sum(count for unit, count in counts.items() if unit not in self._classes)
        if 2 * unknown <= counts.total():
            return ""
        return (
            f"{unknown} of the {counts.total()} units of its first texts are not in {self._where} and become {UNKNOWN} (does it "
            "fit the data: characters or words, upper or lower case?)"
        )

    def check(self, units: Sequence[str], source: str, tag: str) -> None:
        """Check that the vocabulary has all units of a sequence. Raises: DataError, naming `source` and `tag`."""
        for unit in units if UNKNOWN not in self._classes else ():
            if unit not in self._classes:
                raise DataError(
                    f"{source}: expected text of the entries in {self._where}, got {unit!r} in sequence {tag!r} "
                    f"(an entry {UNKNOWN} would cover it)"
                )

    def classes(self, units: Sequence[str]) -> Array:
        """The class of every unit, which `check` accepted: int32 of shape (len(units),)."""
        unknown = self._classes.get(UNKNOWN, -1)
        return numpy.array([self._classes.get(unit, unknown) for unit in units], dtype=numpy.int32)


def split(text: str, units: Units) -> list[str]:
    """The characters of a text, or its words.

    >>> split("zu viel", "characters"), split(" zu  viel", "words")
    (['z', 'u', ' ', 'v', 'i', 'e', 'l'], ['zu', 'viel'])
    """
    return text.split() if units == "words" else list(text.strip())


def read_vocabulary(path: Path) -> Vocabulary:
    """Read a text file with one entry per line; the first is class 0. Raises: DataError."""
    entries = read_lines(path)
    if len(set(entries)) < len(entries):
        twice = next(entry for entry, times in Counter(entries).items() if times > 1)
        raise DataError(f"{path}: expected every entry once, got {twice!r} again")
    return Vocabulary(str(path), entries)


def read_lines(path: Path) -> list[str]:
    """The lines of a text file. Raises: DataError."""
    try:
        return text_lines(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: expected a text file, got: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected text in UTF-8, got: {error}") from None


SUFFIXES = (".npy", ".wav")

Item = tuple[str, dict[str, Array]]


class ItemSequence(Sequence[Item]):
    """Items by number, from 0. A subclass implements `__len__` and `item`."""

    @abstractmethod
    def item(self, number: int) -> Item:
        """One item. Raises: DataError."""

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        numbers = range(len(self))[index]  # also handles negative numbers, and raises IndexError
        return self.item(numbers) if isinstance(numbers, int) else list(map(self.item, numbers))


class FolderDataset(ItemSequence):
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
        if units not in ("characters", "words"):
            raise ConfigError.of("unknown-value", f"units: expected 'characters' or 'words', got {units!r} in the FolderDataset")
        self._folder = Path(folder)
        self._files = _files(self._folder)
        self._texts: dict[str, list[str]] = {}
        self._vocabulary = Vocabulary("", [])
        self._rate: int | None = None
        self.labels: dict[str, list[str]] = {}
        self._tags = sorted(self._files)
        if transcript is None:
            if vocabulary is not None:
                raise ConfigError.of("missing", "vocabulary: expected a transcript with it, got none in the FolderDataset")
        else:
            self._texts = _read_transcript(Path(transcript), units)
            self._tags = list(self._texts)
            missing = [tag for tag in self._tags if tag not in self._files]
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
        if not self._tags:
            raise DataError(f"{transcript or folder}: expected at least one sequence, got none")

    def __len__(self) -> int:
        return len(self._tags)

    def item(self, number: int) -> Item:
        tag = self._tags[number]
        arrays = {"data": self._read(self._files[tag])}
        if tag in self._texts:
            arrays["classes"] = self._vocabulary.classes(self._texts[tag])
        return tag, arrays

    def _read(self, path: Path) -> Array:
        if path.suffix.lower() == ".npy":
            return _read_array(path)
        rate, values = _read_sound(path)
        if self._rate is None:  # that of the first file, so that the result does not depend on which one is read first
            first = next((file for file in map(self._files.__getitem__, self._tags) if file.suffix.lower() == ".wav"), path)
            self._rate = rate if first == path else _read_sound(first)[0]
        if rate != self._rate:
            raise DataError(f"{path}: expected {self._rate} samples per second as in the first file, got {rate}")
        return values


def _files(folder: Path) -> dict[str, Path]:
    """The files by tag."""
    if not folder.is_dir():
        raise DataError(f"{folder}: expected a folder of .npy or .wav files, got {'a file' if folder.exists() else 'nothing'}")
    files: dict[str, Path] = {}
    for path in _walk(folder):
        if path.suffix.lower() in SUFFIXES and path.is_file():
            tag = path.relative_to(folder).with_suffix("").as_posix()
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


def _read_array(path: Path) -> Array:
    try:
        values: Any = numpy.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: expected a .npy file of numbers, got: {error}") from None
    if not isinstance(values, numpy.ndarray):
        raise DataError(f"{path}: expected a .npy file of numbers, got an archive of several arrays")
    return values


def _read_sound(path: Path) -> tuple[int, Array]:
    """The sampling rate in Hz, and the samples."""
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
