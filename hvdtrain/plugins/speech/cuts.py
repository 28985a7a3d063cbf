"""LhotseDataset: the cuts of a Lhotse CutSet, in memory, in a manifest, or in Shar format, each a sequence."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.config.missing import import_package
from hvdtrain.data.combine.user_code import UserDataset
from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.data.formats.items import OTHER_NUMBERS
from hvdtrain.data.indexed import IndexedDataset, rows_to_use
from hvdtrain.data.padding import same_values
from hvdtrain.data.randomness import ITEM, own_numbers
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import BrokenSequence, DataError
from hvdtrain.plugins.speech.columns import check_finite
from hvdtrain.plugins.speech.cut_index import first_cut, index_cuts
from hvdtrain.plugins.speech.keys import LhotseDatasetKeys
from hvdtrain.plugins.speech.log_mel import LogMel, log_mel_of
from hvdtrain.plugins.speech.text import TextEncoder, text_encoder
from hvdtrain.plugins.speech.wav import damage, damage_of_file


class LhotseDataset(IndexedDataset):
    """The cuts that can be read. The first one says what the others have to match.

    Raises:
        DataError: the package is not installed, the manifest is not one of cuts, or there are too many broken cuts.
    """

    def __init__(self, where: str, keys: LhotseDatasetKeys, scanning: Scanning) -> None:
        cuts = _open(import_package("lhotse", where), where, keys.cuts)
        origin = str(keys.cuts) if isinstance(keys.cuts, (str, os.PathLike)) else f"{where}.cuts"
        first = first_cut(where, origin, cuts)
        self._features = _features(where, keys, first)
        self._rate = int(first.sampling_rate) if first.has_recording or self._features != "feats" else None
        self._channels = int(first.num_channels) if self._features == "wav" else 1
        self._encoder: TextEncoder | None = None
        self.streams = {"data": self._stream(first)}
        if keys.units is not None:
            vocabularies = (keys.of_key(name, "classes") for name in ("vocabulary", "vocabulary_from"))
            self._encoder = text_encoder(keys.units, *vocabularies)
            self.streams["classes"] = self._encoder.stream
        field = "features" if self._features == "feats" else "recording"
        described = [keys.features, keys.log_mel, keys.units, keys.vocabulary, keys.vocabulary_from]
        self._index = index_cuts(where, origin, cuts, field, described, self._lengths, list(self.streams), scanning)
        used = rows_to_use(self._index.lengths.values(), scanning.broken, self._index.broken)
        super().__init__(self.streams, self._index.tags, self._index.lengths, used)
        self.is_stochastic = not self._repeats()

    def row(self, number: int) -> dict[str, Array]:
        return self._arrays(self._index.cut(number), self.where(number))

    def where(self, number: int) -> str:
        return self._index.describe(number)

    def warnings(self) -> list[str]:
        return [f"{self.where(int(self._used[0]))} {OTHER_NUMBERS}"] if self.is_stochastic else []

    def _repeats(self) -> bool:
        """Whether the first cut is the same when it is read again with the same random numbers."""
        read: list[Array] = []
        with suppress(BrokenSequence, IndexError):  # reading it for a batch says why
            for _ in range(2):
                with own_numbers(ITEM):
                    read.append(self.sequence(0)["data"])
        return len(read) < 2 or same_values(*read)

    def _lengths(self, cut: Any, where: str) -> dict[str, int]:
        lengths = {"data": self._length(cut, where)}
        if self._encoder is not None:
            lengths["classes"] = self._encoder.length(text_of(cut, where), where)
        return lengths

    def _arrays(self, cut: Any, where: str) -> dict[str, Array]:
        if self._features != "feats" and (problem := _damage(cut)):
            raise BrokenSequence(f"{where}: expected a whole sound file, got {problem}")
        try:
            values = self._values(cut)
        except Exception as error:  # of Lhotse's readers, which are many
            raise BrokenSequence(f"{where}: expected a cut that Lhotse can read, got {type(error).__name__}: {error}") from None
        stream = self.streams["data"]
        if values.shape[1:] != stream.shape:
            raise BrokenSequence(f"{where}: expected frames of shape {stream.shape} as in the first cut, got {values.shape[1:]}")
        arrays = {"data": check_finite(values.astype(stream.dtype, copy=False), where)}
        if self._encoder is not None:
            arrays["classes"] = self._encoder.encode(text_of(cut, where), where)
        return arrays

    def _length(self, cut: Any, where: str) -> int:
        if self._features == "feats":
            if not cut.has_features or cut.num_frames is None:
                raise BrokenSequence(f"{where}: expected stored features, got none")
            return int(cut.num_frames)
        if cut.num_samples is None:
            raise BrokenSequence(f"{where}: expected a recording, got none")
        if int(cut.sampling_rate) != self._rate:
            raise BrokenSequence(
                f"{where}: expected {self._rate} samples per second, as the first cut has, got {cut.sampling_rate} "
                "(CutSet.resample changes it)"
            )
        if self._features == "wav":
            return int(cut.num_samples)
        if isinstance(self._features, LogMel):
            return int(self._features.num_frames(numpy.array(cut.num_samples)))
        from lhotse.utils import compute_num_frames

        return int(compute_num_frames(cut.duration, self._features.frame_shift, cut.sampling_rate))

    def _values(self, cut: Any) -> Array:
        if self._features == "feats":
            return numpy.asarray(cut.load_features())
        if isinstance(self._features, (str, LogMel)):
            sound = numpy.atleast_2d(numpy.asarray(cut.load_audio(), dtype=numpy.float32)).T
            return sound if isinstance(self._features, str) else self._features.features(sound)
        return numpy.asarray(cut.compute_features(self._features))

    def _stream(self, first: Any) -> Stream:
        if self._features == "wav":
            return Stream(numpy.dtype(numpy.float32), (self._channels,), self._channels, sparse=False)
        if isinstance(self._features, LogMel):
            return self._features.stream
        dim = first.num_features if self._features == "feats" else self._features.feature_dim(first.sampling_rate)
        return Stream(numpy.dtype(numpy.float32), (int(dim),), int(dim), sparse=False)


def _damage(cut: Any) -> str:
    """What is wrong with the files of a cut's recordings, of which Lhotse fills in up to half a second; '': nothing."""
    simple_cuts = [track.cut for track in getattr(cut, "tracks", ())] or [cut]
    recordings = [recording for simple_cut in simple_cuts if (recording := getattr(simple_cut, "recording", None)) is not None]
    for source in (source for recording in recordings for source in recording.sources):
        with suppress(OSError):  # reading it says why
            if source.type == "memory" and (problem := damage(io.BytesIO(source.source), len(source.source))):
                return problem
            if source.type == "file" and (problem := damage_of_file(source.source)):
                return f"{source.source}: {problem}"
    return ""


def text_of(cut: Any, where: str) -> str:
    """The texts of a cut's supervisions in the order of their beginnings: a manifest may have another one, such as by id.

    Raises: BrokenSequence, if one has none: an empty text is ''.
    """
    texts = [supervision.text for supervision in sorted(cut.supervisions, key=attrgetter("start"))]
    if None in texts:
        raise BrokenSequence(f"{where}: expected a text in every supervision, got none (units = None: without texts)")
    return " ".join(text for text in texts if text)


def open_cuts(where: str, keys: LhotseDatasetKeys, datasets: Mapping[str, Dataset], scanning: Scanning) -> Dataset:
    """Open a LhotseDataset; its transforms and extractors may draw random numbers. Raises: DataError."""
    return UserDataset(where, LhotseDataset(where, keys, scanning), scanning)


def _features(where: str, keys: LhotseDatasetKeys, first: Any) -> Any:
    """'wav', 'feats', a LogMel or an extractor. Raises: DataError."""
    features = keys.features
    if features is None:
        features = "feats" if first.has_features else "wav"
    if features == "feats" and not first.has_features:
        raise DataError(f"{where}.features: expected stored features in the cuts, got none in {first.id!r} ('wav' or 'fbank')")
    if features != "feats" and not first.has_recording:
        raise DataError(f"{where}.features: expected recordings in the cuts, got none in {first.id!r}")
    if features == "fbank":
        return log_mel_of(where, int(first.sampling_rate), keys.log_mel)
    return features


def _open(lhotse: Any, where: str, cuts: Any) -> Any:
    if isinstance(cuts, (str, os.PathLike)):
        path = Path(cuts)
        if not path.exists():
            raise DataError(f"{where}.cuts: expected a manifest of cuts or a folder in Shar format, got nothing at {path}")
        try:
            if path.is_dir():
                return lhotse.CutSet.from_shar(in_dir=path)
            cuts = lhotse.CutSet.from_jsonl_lazy(path) if ".jsonl" in path.name else lhotse.load_manifest(path)
        except Exception as error:  # Lhotse checks with assert
            raise DataError(f"{path}: expected a manifest of cuts, or a folder in Shar format, got: {error}") from None
    if not isinstance(cuts, lhotse.CutSet):
        raise DataError(f"{where}.cuts: expected a CutSet, got {type(cuts).__name__} (CutSet.from_manifests makes one)")
    return cuts
