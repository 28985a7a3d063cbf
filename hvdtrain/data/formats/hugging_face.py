"""A folder of the Hugging Face package `datasets`, as a source of sequences to convert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.data.formats.conversions import Convert, classes, numbers, sound
from hvdtrain.data.formats.folder import Item, ItemSequence, Units, Vocabulary, read_vocabulary
from hvdtrain.data.formats.tables import Group
from hvdtrain.errors import ConfigError, DataError

BLOCK = 64
"""The number of rows read at once: reading a single row takes about a millisecond, most of which is overhead."""


@dataclass(frozen=True)
class Column:
    """How a column becomes a data key.

    Attributes:
        name: of the column.
        convert: turns the value of a row into an array; also gets a description of the row for messages. Raises: DataError.
        labels: the names of the classes, if the column has them.
        decodes: whether the values are encoded files.
    """

    name: str
    convert: Convert
    labels: tuple[str, ...] = ()
    decodes: bool = False


class HuggingFaceDataset(ItemSequence):
    """The rows of a folder that `save_to_disk` wrote, each a sequence.

    The type of a column determines its arrays: integers and lists of them, class indices (a ClassLabel has the names of the
    classes); lists of floats, numbers of shape (frames,); lists of lists and Array2D, vectors of shape (frames,
    features); strings and lists of them, texts, or classes of a vocabulary; Audio, float32 from -1 to 1 of shape (samples,
    channels). A single value is a sequence of one frame.

    Lengths are unknown until the rows are read, so it is converted once with hvdtrain dump.

    Args:
        folder: the folder that `save_to_disk` wrote.
        part: the name of one dataset ("train", "test", ...), if the folder holds several.
        columns: by data key, the column; None: all columns under their own names, without the column of the tags.
        tag: the column of the tags; None: row-0, row-1, ...
        vocabulary: by data key, for columns of strings, a text file with one entry per line; the first is class 0, and `<unk>`
            stands for everything else. Columns of strings without a vocabulary stay texts.
        units: whether an entry is a character of a string, or a word between spaces. In a list of strings, each one is an entry.

    Attributes:
        labels: the names of the classes, by data key.

    Raises:
        DataError: the package is not installed, or the content of the folder is not as described here.
    """

    def __init__(
        self,
        folder: str,
        part: str | None = None,
        columns: Mapping[str, str] | None = None,
        tag: str | None = None,
        vocabulary: Mapping[str, str] | None = None,
        units: Units = "characters",
    ) -> None:
        if units not in ("characters", "words"):
            raise ConfigError.of(
                "unknown-value", f"units: expected 'characters' or 'words', got {units!r} in the HuggingFaceDataset"
            )
        self._folder = folder
        rows = _load(folder, part)
        names = list(rows.column_names)
        columns = {name: name for name in names if name != tag} if columns is None else dict(columns)
        for what, name in [("tag", tag)] * (tag is not None) + [(f"columns.{key}", name) for key, name in columns.items()]:
            if name not in names:
                raise DataError(f"{what}: expected a column of {folder} ({', '.join(names)}), got {name!r}")
        vocabularies = {key: read_vocabulary(Path(path)) for key, path in (vocabulary or {}).items()}
        for key in vocabularies:
            if key not in columns:
                raise DataError(f"vocabulary: expected data keys ({', '.join(columns)}), got {key!r} in {folder}")
        self._columns = {
            key: _column(folder, rows.features[name], name, vocabularies.get(key), units) for key, name in columns.items()
        }
        self.labels = {key: list(column.labels) for key, column in self._columns.items() if column.labels}
        self._tag = tag
        # In Arrow's form: the package's conversion to numpy makes numbers of missing values, and float32 of float64.
        self._rows = _leave_undecoded(rows, [column.name for column in self._columns.values() if column.decodes]).with_format(
            "arrow", columns=sorted({*columns.values(), *([tag] if tag is not None else [])})
        )
        self._block = range(0)
        self._group: Group | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def item(self, number: int) -> Item:
        if self._group is None or number not in self._block:
            first = number // BLOCK * BLOCK
            self._group = Group(self._folder, first, self._rows[first : first + BLOCK])
            self._block = range(first, min(first + BLOCK, len(self)))
        group, place = self._group, number - self._block.start
        arrays = {
            key: column.convert(group.value(column.name, place), group.describe(column.name, place))
            for key, column in self._columns.items()
        }
        tag = f"row-{number}" if self._tag is None else str(numpy.asarray(group.value(self._tag, place)).item())
        return tag, arrays


def _load(folder: str, part: str | None) -> Any:
    """The dataset in a folder, or one of several. Raises: DataError."""
    try:
        import datasets
    except ImportError:
        raise DataError("HuggingFaceDataset: expected the package datasets, got none (pip install datasets)") from None
    try:
        found = datasets.load_from_disk(folder)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: expected a folder that save_to_disk of the package datasets wrote, got: {error}") from None
    parts = list(found) if isinstance(found, datasets.DatasetDict) else None
    if (part is None) != (parts is None) or (parts is not None and part not in parts):
        expected = f"one of {', '.join(parts)}" if parts is not None else "none, as the folder holds one dataset"
        raise DataError(f"part: expected {expected}, got {part!r} in {folder}")
    return found if parts is None else found[part]


def _leave_undecoded(rows: Any, names: Sequence[str]) -> Any:
    """The dataset with encoded files left undecoded: the decoder of the package needs a framework."""
    import datasets

    for name in names:
        rows = rows.cast_column(name, datasets.Audio(decode=False))
    return rows


def _column(folder: str, feature: Any, name: str, vocabulary: Vocabulary | None, units: Units) -> Column:
    """How a column of some type is converted. Raises: DataError, if the type is not supported."""
    import datasets

    axes, inner = 0, feature
    if isinstance(feature, datasets.Array2D):
        axes, inner = 2, datasets.Value(feature.dtype)
    while isinstance(inner, (datasets.Sequence, datasets.List, datasets.LargeList)) and axes < 2:
        axes, inner = axes + 1, inner.feature
    is_text = isinstance(inner, datasets.Value) and inner.dtype in ("string", "large_string")
    if vocabulary is not None and not is_text:
        raise DataError(f"vocabulary: expected a column of strings, got {feature} in column {name!r} of {folder}")
    if isinstance(inner, datasets.Audio) and axes == 0:
        return Column(name, sound(inner.sampling_rate), decodes=True)
    if isinstance(inner, datasets.ClassLabel) and axes < 2:
        return Column(name, numbers(max(axes, 1), "int32"), tuple(inner.names))
    if is_text and axes < 2:
        if vocabulary is None:
            return Column(name, lambda value, where: numpy.array(list(value) if axes else [str(value)], dtype=object))
        return Column(name, classes(vocabulary, units), tuple(vocabulary.entries))
    if isinstance(inner, datasets.Value) and inner.dtype.startswith(("int", "uint", "float", "bool")):
        return Column(name, numbers(max(axes, 1), inner.dtype))
    raise DataError(
        f"columns: expected columns of numbers, lists and lists of lists of numbers, ClassLabel, strings, lists of strings or "
        f"Audio, got {feature} in column {name!r} of {folder} ('columns' names those to take)"
    )
