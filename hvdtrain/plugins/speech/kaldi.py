"""KaldiFolder: a data folder of Kaldi or a dump folder of ESPnet, read as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy

from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.data.formats.found import find_lengths, fingerprint_of, measure_broken
from hvdtrain.data.indexed import IndexedDataset, rows_to_use
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError
from hvdtrain.plugins.speech.columns import ArrayColumn, Column, FbankColumn, NumbersColumn, SoundColumn, TextColumn
from hvdtrain.plugins.speech.keys import KaldiFolderKeys
from hvdtrain.plugins.speech.log_mel import log_mel_of
from hvdtrain.plugins.speech.sound import SoundReader
from hvdtrain.plugins.speech.tables import Table
from hvdtrain.plugins.speech.text import text_encoder

DIGITS_OF_KALDI = 6
"""The digits of a number in a file that Kaldi's programs write."""

MOST_ROUNDING = 0.005
"""Seconds by which utt2dur may be wrong, as its numbers are rounded; with fewer digits, lengths are found by reading."""


class KaldiFolder(IndexedDataset):
    """The utterances of a folder that all of its tables have, each a sequence whose tag is its id.

    Raises:
        DataError: a file is missing or not as Kaldi describes it, or there are too many broken utterances.
    """

    def __init__(self, where: str, keys: KaldiFolderKeys, datasets: Mapping[str, Dataset], scanning: Scanning) -> None:
        self._where = where
        self._keys = keys
        self._scanning = scanning
        self._folder = Path(keys.folder)
        if not self._folder.is_dir():
            got = "a file" if self._folder.exists() else "nothing"
            raise DataError(f"{where}.folder: expected a folder with Kaldi's tables, got {got} at {keys.folder}")
        self._files = {**keys.columns(), **{name: (str(file), str(kind)) for name, (file, kind) in keys.data_keys.items()}}
        self._tables: dict[str, Table] = {}
        recordings = ("wav.scp", "sound")
        has_segments = recordings in self._files.values() and (self._folder / "segments").is_file()
        base = self._table("segments" if has_segments else next(iter(self._files.values()))[0])
        tables = {
            name: self._table("segments" if has_segments and entry == recordings else entry[0])
            for name, entry in self._files.items()
        }
        positions = {name: table.positions(base.ids) for name, table in tables.items()}
        used = numpy.flatnonzero(numpy.all([column >= 0 for column in positions.values()], axis=0))
        further = {id(table): table for table in tables.values() if table is not base}
        scanning.broken.leave_out(_incomplete(base, further.values()), len(used))
        if not len(used):
            raise DataError(f"{base.path}: expected at least one utterance, got none")
        self._ids = base.ids if len(used) == len(base.ids) else base.ids[used]
        self._columns = {name: self._column(name, tables[name], positions[name][used]) for name in self._files}
        lengths = self._lengths()

        def measure(number: int) -> tuple[dict[str, int], dict[str, int]]:
            return {name: self._columns[name].length(number) for name in lengths if lengths[name][number] < 0}, {}

        rows = rows_to_use(lengths.values(), scanning.broken, measure_broken(lengths, measure))
        super().__init__({name: column.stream for name, column in self._columns.items()}, self._ids, lengths, rows)
        del self._tables  # those that are still needed are the columns'

    def row(self, number: int) -> dict[str, Array]:
        return {name: column.read(number) for name, column in self._columns.items()}

    def where(self, number: int) -> str:
        return next(iter(self._columns.values())).where(number)

    def warnings(self) -> list[str]:
        texts = {name: column.misfit() for name, column in self._columns.items() if isinstance(column, TextColumn)}
        return [f"{name!r}: {text}" for name, text in texts.items() if text]

    def _table(self, name: str) -> Table:
        if name not in self._tables:
            of_texts = ("text", *(file for file, kind in self._files.values() if kind in ("characters", "words", "text")))
            self._tables[name] = Table(self._folder / name, may_be_empty=name in of_texts)
        return self._tables[name]

    def _column(self, name: str, table: Table, positions: Array) -> Column:
        file, kind = self._files[name]
        keys = self._keys
        root = Path(keys.root or "")
        if kind == "sound":
            recordings = self._table(file)
            sound = SoundColumn(table, positions, recordings, SoundReader(root, keys.allow_commands), keys.sample_rate)
            self._give_samples(name, sound)
            if name == "data" and keys.features == "fbank":
                return FbankColumn(sound, log_mel_of(self._where, sound.rate, keys.log_mel))
            return sound
        if kind in ("kaldi_ark", "npy"):
            return ArrayColumn(table, positions, root, kind, keys.allow_commands)
        if kind in ("text_int", "csv_int", "csv_float"):
            return NumbersColumn(table, positions, "float32" if kind == "csv_float" else "int32")
        return TextColumn(
            table, positions, text_encoder(kind, keys.of_key("vocabulary", name), keys.of_key("vocabulary_from", name))
        )

    def _give_samples(self, name: str, sound: SoundColumn) -> None:
        """Give a column of sound its lengths in samples, if the folder has them; for segments, those of their recordings."""
        file = self._files[name][0]
        is_features = name == "data" and self._keys.features == "fbank"
        if name in self._keys.shapes and not is_features:
            sound.set_lengths(self._first_numbers(Path(self._keys.shapes[name]), self._ids))
        elif file == "wav.scp" and self._has("utt2num_samples", self._ids):
            sound.set_lengths(self._first_numbers(self._folder / "utt2num_samples", self._ids))
        elif not sound.num_recordings:
            if file == "wav.scp" and self._has("utt2dur", self._ids):
                samples, tolerance = self._listed_seconds("utt2dur", self._ids, sound.rate)
                if tolerance <= MOST_ROUNDING * sound.rate + 1:
                    sound.set_lengths(samples, tolerance)
        elif self._has("reco2num_samples", ids := self._table(file).ids):
            sound.set_recording_lengths(self._first_numbers(self._folder / "reco2num_samples", ids))
        else:
            fingerprint = f"recordings {fingerprint_of([str(self._table(file).path), self._keys.root, sound.rate])}"
            lengths = {name: sound.recording_length}
            measured = self._find(f"{self._where}, recordings", fingerprint, sound.num_recordings, lengths)
            sound.set_recording_lengths(measured[name])

    def _find(self, where: str, fingerprint: str, size: int, lengths: Mapping[str, Callable[[int], int]]) -> dict[str, Array]:
        """By data key, lengths that only reading shows, by functions of a number."""

        def measure(number: int) -> tuple[dict[str, int], dict[str, int]]:
            return {name: length(number) for name, length in lengths.items()}, {}

        measured = find_lengths(where, lambda: fingerprint, lengths, size, measure, self._scanning)
        if measured.path is not None:
            self.advice = f" (if the data has changed, remove {measured.path})"
        return measured.lengths

    def _has(self, file: str, ids: Array) -> bool:
        """Whether the folder has a table with a line for each of these ids."""
        return (self._folder / file).is_file() and bool((self._table(file).positions(ids) >= 0).all())

    def _first_numbers(self, path: Path, ids: Array) -> Array:
        table = self._tables.get(path.name) if path.parent == self._folder else None
        table = table or Table(path)
        positions = table.positions(ids)
        if (missing := numpy.flatnonzero(positions < 0)).size:
            raise DataError(f"{path}: expected a line for every utterance, got none for {ids[int(missing[0])].decode()!r}")
        return numpy.fromiter((table.numbers(position, 1, int)[0] for position in positions.tolist()), numpy.int64, len(ids))

    def _listed_seconds(self, file: str, ids: Array, rate: int) -> tuple[Array, int]:
        """The samples of a table of seconds, and by how many they may be wrong, as the seconds are rounded."""
        table = self._table(file)
        positions = table.positions(ids).tolist()
        seconds = numpy.fromiter((table.numbers(position, 1, float)[0] for position in positions), numpy.float64, len(ids))
        decimals = max(len(table.value(position).partition(".")[2]) for position in positions)
        # Kaldi prints six digits, so a long recording has fewer decimals than the others; Python scripts print a fixed number.
        decimals = min(decimals, DIGITS_OF_KALDI - len(str(int(seconds.max()))))
        return numpy.rint(seconds * rate).astype(numpy.int64), int(0.5 * 10.0**-decimals * rate) + 1

    def _lengths(self) -> dict[str, Array]:
        """By data key, the lengths of all utterances, found by reading where no file has them."""
        lengths: dict[str, Array] = {}
        for name, column in self._columns.items():
            file, kind = self._files[name]
            column_lengths = column.lengths()
            if column_lengths is None and name in self._keys.shapes:
                column_lengths = self._first_numbers(Path(self._keys.shapes[name]), self._ids)
            if column_lengths is None and kind == "kaldi_ark" and file == "feats.scp" and self._has("utt2num_frames", self._ids):
                column_lengths = self._first_numbers(self._folder / "utt2num_frames", self._ids)
            if column_lengths is not None:
                lengths[name] = column_lengths
        unknown = {name: column.length for name, column in self._columns.items() if name not in lengths}
        if not unknown:
            return lengths
        keys = self._keys
        described = {name: [*self._files[name], keys.of_key("vocabulary", name), keys.features] for name in unknown}
        tables = sorted({str(column.table.path) for column in self._columns.values()})
        fingerprint = f"kaldi {fingerprint_of([tables, keys.root, keys.sample_rate, keys.log_mel, described])}"
        return lengths | self._find(self._where, fingerprint, len(self._ids), unknown)


def _incomplete(base: Table, further: Iterable[Table]) -> Iterator[str]:
    """A message for every utterance that not all tables have."""
    for table in further:
        for index in numpy.flatnonzero(table.positions(base.ids) < 0).tolist():
            yield f"{base.where(index)}: expected a line in {table.path}, got none"
        if not numpy.array_equal(table.ids, base.ids):
            for position in numpy.flatnonzero(base.positions(table.ids) < 0).tolist():
                yield f"{table.where(position)}: expected a line in {base.path}, got none"
