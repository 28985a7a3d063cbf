"""MapDataset: a function applied to every sequence of a dataset, in worker processes if it is costly.

The plan of an epoch needs all lengths in advance. So the function either keeps the lengths, or another one (`map_lengths`)
computes the new lengths of all sequences of an epoch at once, and every sequence is checked against them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy

from hvdtrain.config.references import resolve
from hvdtrain.data.combine.user_code import Mapped, UserDataset
from hvdtrain.data.dataset import Dataset, Scanning, ended_iterator_error
from hvdtrain.data.padding import holds
from hvdtrain.data.randomness import EPOCH, own_numbers
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import DataError
from hvdtrain.plugins.combine.keys import MapDatasetKeys, OutputKeys, check_steps
from hvdtrain.plugins.combine.meta import refuse_selection
from hvdtrain.plugins.combine.steps import Draw, Pipeline


class MapDataset(Mapped):
    """The sequences of a dataset with a function applied to them.

    Args:
        where: the config key of the dataset, for messages.
        streams: of the arrays that the function returns.
        lengths_of: computes the lengths after the function, by data key, from the dataset inside and the epoch.
        lengths_vary: whether they depend on the epoch.
        seed: of the function's `rng`, together with the epoch and the index of the sequence.
        read_by_steps: further datasets, to be closed with this one.
    """

    is_stochastic = True
    memory_mapped = frozenset()

    def __init__(
        self,
        where: str,
        dataset: Dataset,
        map_seq: Callable[..., Any],
        streams: Mapping[str, Stream],
        lengths_of: Callable[[Dataset, int], Mapping[str, Array]],
        lengths_vary: bool,
        seed: int,
        read_by_steps: Sequence[Dataset] = (),
    ) -> None:
        super().__init__(dataset, read_by_steps)
        self._where = where
        self._map_seq = map_seq
        self._arguments = accepted_arguments(map_seq, ("epoch", "index", "rng"))
        self._seed = seed
        self._epoch = 1
        self._draw = 0
        self._lengths_of = lengths_of
        self._lengths_vary = lengths_vary
        self.streams = streams
        self.lengths = lengths_of(dataset, 1)

    def at_epoch(self, epoch: int) -> Self:
        changed = super().at_epoch(epoch)
        changed._epoch = epoch
        if self._lengths_vary or changed._dataset.lengths is not self._dataset.lengths:
            changed.lengths = self._lengths_of(changed._dataset, epoch)
        return changed

    def redrawn(self, draw: int) -> Self:
        changed = super().redrawn(draw)
        changed._draw = draw
        return changed

    def map(self, index: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
        available = {"epoch": self._epoch, "index": index}
        arguments: dict[str, Any] = {name: value for name, value in available.items() if name in self._arguments}
        if "rng" in self._arguments:
            # The same on every rank, in any order of the sequences; a RandomState, as existing configs call its methods.
            arguments["rng"] = numpy.random.RandomState([self._seed, self._epoch, index, *([self._draw] if self._draw else [])])
        # A copy, as the user's items and a cache keep their arrays: an array changed in place would be changed again next time.
        copies = {name: values.copy() if values.flags.writeable else values for name, values in arrays.items()}
        try:
            mapped = self._map_seq(copies, **arguments)
        except StopIteration as error:
            raise ended_iterator_error(f"{self._where}.map_seq, sequence {index}", error) from error
        except BaseException as error:  # including SystemExit, which has no message
            error.add_note(f"in {self._where}.map_seq, sequence {index}")
            raise
        if not isinstance(mapped, dict):
            raise DataError(f"{self._where}.map_seq: expected a dict of arrays, got {type(mapped).__name__} for sequence {index}")
        return {name: self._check_array(index, name, mapped) for name in self.streams}

    def how_read(self) -> str:
        return "; ".join(filter(None, [self._dataset.how_read(), "mapped"]))

    def _check_array(self, index: int, name: str, mapped: Mapping[str, Any]) -> Array:
        """One array, checked against its stream and against the length that batches are planned with. Raises: DataError."""
        where = f"{self._where}.map_seq"
        if name not in mapped:
            raise DataError(
                f"{where}: expected the data key {name!r}, got only {', '.join(map(repr, mapped))} for sequence {index}"
            )
        stream = self.streams[name]
        try:
            values = numpy.asarray(mapped[name])
        except (TypeError, ValueError, RuntimeError) as error:  # as of a tensor on a GPU, or of a type that numpy does not have
            got = f"{type(mapped[name]).__name__} for sequence {index}: {error}"
            raise DataError(f"{where}: expected an array in {name!r}, got {got}") from None
        if values.ndim == 0 or values.shape[1:] != stream.shape or not numpy.can_cast(values.dtype, stream.dtype, "same_kind"):
            got = f"{values.dtype} of shape {values.shape[1:]}" if values.ndim else f"the number {values}"
            raise DataError(
                f"{where}: expected {stream.dtype} frames of shape {stream.shape} in {name!r}, got {got} for sequence {index} "
                "(declare what it returns in map_outputs)"
            )
        if not holds(stream.dtype, values):
            raise DataError(
                f"{where}: expected numbers that {stream.dtype} holds in {name!r}, got {values.dtype} from {values.min()} to "
                f"{values.max()} for sequence {index}"
            )
        if len(values) != self.lengths[name][index]:
            raise DataError(
                f"{where}: expected {self.lengths[name][index]} frames in {name!r}, got {len(values)} for sequence {index} "
                "(return the new lengths from map_lengths)"
            )
        return values.astype(stream.dtype, copy=False)


def accepted_arguments(function: Callable[..., Any], names: tuple[str, ...]) -> tuple[str, ...]:
    """The names among `names` that a function accepts as keyword arguments.

    >>> accepted_arguments(lambda arrays, *, epoch: None, ("epoch", "rng")), accepted_arguments(lambda arrays, **_: None, ("rng",))
    (('epoch',), ('rng',))
    """  # noqa: E501
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions written in C
        return ()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return names
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = {parameter.name for parameter in parameters if parameter.kind in by_keyword}
    return tuple(name for name in names if name in accepted)


def open_map(where: str, keys: MapDatasetKeys, datasets: Mapping[str, Dataset], scanning: Scanning) -> Dataset:
    """Open a MapDataset.

    Raises:
        DataError: a function cannot be imported, or map_lengths returns something other than lengths.
    """
    dataset = datasets["dataset"]
    if isinstance(keys.map_seq, list):
        steps, _ = check_steps("map_seq", keys.map_seq, keys.datasets)
        return _open_steps(where, keys, steps, datasets, scanning)
    streams = dict(dataset.streams)
    if keys.map_outputs is not None:
        streams = {name: _stream(OutputKeys(**entry)) for name, entry in keys.map_outputs.items()}
    map_seq = _function(f"{where}.map_seq", keys.map_seq)
    map_lengths = _function(f"{where}.map_lengths", keys.map_lengths) if keys.map_lengths is not None else None
    takes_epoch = map_lengths is not None and bool(accepted_arguments(map_lengths, ("epoch",)))

    def lengths_of(inside: Dataset, epoch: int) -> Mapping[str, Array]:
        lengths: Any = {name: column.copy() for name, column in inside.lengths.items()}
        if map_lengths is not None:
            with own_numbers(EPOCH, epoch if takes_epoch else 0):  # the same on all ranks, also if it draws
                lengths = map_lengths(lengths, epoch=epoch) if takes_epoch else map_lengths(lengths)
        return _check_lengths(where, lengths, inside.num_sequences, streams)

    mapped = MapDataset(where, dataset, map_seq, streams, lengths_of, takes_epoch, keys.map_seed)
    return UserDataset(where, mapped, scanning, keys.num_workers, keys.map_seed)


def _open_steps(
    where: str, keys: MapDatasetKeys, steps: list[Any], datasets: Mapping[str, Dataset], scanning: Scanning
) -> Dataset:
    dataset = datasets["dataset"]
    for name in keys.datasets:
        refuse_selection(f"{where}.datasets.{name}", datasets[name], "a step takes any of its sequences")

    def call(function: Callable[..., Any], arrays: Mapping[str, Array], draw: Draw) -> Any:
        arguments = {"epoch": draw.epoch, "index": draw.index, "rng": draw.rng}
        mapped = function(arrays, **{name: arguments[name] for name in accepted_arguments(function, tuple(arguments))})
        if not isinstance(mapped, dict):
            raise DataError(f"{where}.map_seq: expected a dict of arrays from each function, got {type(mapped).__name__}")
        return mapped

    pipeline = Pipeline(f"{where}.map_seq", steps, dataset, datasets, keys.map_seed, call, scanning)

    def lengths_of(inside: Dataset, epoch: int) -> Mapping[str, Array]:
        return _check_lengths(where, pipeline.lengths(inside, epoch), inside.num_sequences, pipeline.streams)

    is_random = pipeline.has_random_lengths
    read_by_steps = [inner for name, inner in datasets.items() if name != "dataset"]
    mapped = MapDataset(where, dataset, pipeline, pipeline.streams, lengths_of, is_random, keys.map_seed, read_by_steps)
    if not keys.num_workers and not any(map(callable, steps)):
        return mapped  # the package's own steps draw from their rng
    return UserDataset(where, mapped, scanning, keys.num_workers, keys.map_seed)


def _function(where: str, function: Any) -> Callable[..., Any]:
    try:
        return resolve(function) if isinstance(function, str) else function  # type: ignore[no-any-return]  # checked before
    except ImportError as error:
        raise DataError(f"{where}: expected something that can be imported, got {error}") from error


def _check_lengths(where: str, lengths: Any, num_sequences: int, streams: Mapping[str, Stream]) -> dict[str, Array]:
    if not isinstance(lengths, dict):
        raise DataError(f"{where}.map_lengths: expected a dict of lengths, got {type(lengths).__name__}")
    result = {}
    for name in streams:
        if name not in lengths:
            raise DataError(
                f"{where}.map_lengths: expected the lengths of {name!r}, got only {', '.join(map(repr, lengths))} "
                "(map_lengths must return the lengths of new data keys)"
            )
        column = numpy.asarray(lengths[name])
        if column.shape != (num_sequences,) or column.dtype.kind not in "iu" or column.min(initial=0) < 0:
            raise DataError(
                f"{where}.map_lengths: expected {num_sequences} integers of 0 or more for {name!r}, "
                f"got {column.dtype} of shape {column.shape}" + (f" from {column.min()} on" if column.size else "")
            )
        result[name] = column.astype(numpy.int32)
    return result


def _stream(entry: OutputKeys) -> Stream:
    dtype = numpy.dtype(entry.dtype or ("int32" if entry.sparse else "float32"))
    return Stream(dtype, () if entry.sparse else (entry.dim,), entry.dim, entry.sparse)
