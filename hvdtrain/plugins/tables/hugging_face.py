"""A folder of the Hugging Face package `datasets`, as a source of sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from hvdtrain.config.missing import import_package
from hvdtrain.errors import DataError
from hvdtrain.plugins.speech.vocabulary import Units
from hvdtrain.plugins.tables.conversions import Convert, TextClasses, check_units, numbers, sound
from hvdtrain.plugins.tables.shards import text_conversions
from hvdtrain.plugins.tables.tables import FEW, Group, RowFile, Rows, RowShards


class HuggingFaceDataset(RowShards):
    """The rows of a folder that `save_to_disk` wrote, each a sequence.

    The type of a column determines its arrays: integers and lists of them, class indices (a ClassLabel has the names of the
    classes); lists of floats, numbers of shape (frames,); lists of lists and Array2D, vectors of shape (frames,
    features); strings and lists of them, texts, or classes of a vocabulary; Audio, float32 from -1 to 1 of shape (samples,
    channels). A single value is a sequence of one frame.

    Lengths are unknown until the rows are read, so it is best converted once with hvdtrain dump.

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
        check_units(units, "HuggingFaceDataset")
        rows, self._stored = _load(folder, part)
        names = list(rows.column_names)
        columns = {name: name for name in names if name != tag} if columns is None else dict(columns)
        for option, name in [("tag", tag)] * (tag is not None) + [(f"columns.{key}", name) for key, name in columns.items()]:
            if name not in names:
                raise DataError(f"{option}: expected a column of {folder} ({', '.join(names)}), got {name!r}")
        for key in vocabulary or {}:
            if key not in columns:
                raise DataError(f"vocabulary: expected data keys ({', '.join(columns)}), got {key!r} in {folder}")
        self.texts = text_conversions(vocabulary or {}, units)
        self.columns = columns
        conversions = {key: _conversion(folder, rows.features[name], name, self.texts.get(key)) for key, name in columns.items()}
        self.convert = {key: convert for key, (convert, _) in conversions.items()}
        self.labels = {key: labels for key, (_, labels) in conversions.items() if labels}
        # In Arrow's form: the package's conversion to numpy makes numbers of missing values, and float32 of float64.
        table = rows.data.table.select(sorted({*columns.values(), *([tag] if tag is not None else [])}))
        self.rows = Rows([_Batches(folder, table)], table.column_names)
        tags = None
        if tag is not None:
            if not str(getattr(rows.features[tag], "dtype", "")).startswith(("string", "large_string", "int", "uint")):
                expected = "tag: expected a column of strings or integers"
                raise DataError(f"{expected}, got {rows.features[tag]} in column {tag!r} of {folder}")
            group = Group(folder, 0, table.select([tag]))
            values = (str(numpy.asarray(group.value(tag, row)).item()) for row in range(len(table)))
            tags = [numpy.array([value.encode("utf-8") for value in values], dtype=bytes)]
        super().__init__([folder], [len(table)], tags)

    def files(self) -> Sequence[str]:
        return self._stored or self.paths


class _Batches(RowFile):
    def __init__(self, folder: str, table: Any) -> None:
        super().__init__(folder)
        self._batches = [batch for batch in table.to_batches(FEW) if batch.num_rows]
        self.bounds = numpy.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def read(self, number: int, columns: Sequence[str]) -> Any:
        return self._read(number, columns)  # whatever the package has written into the folder meanwhile

    def _read(self, number: int, columns: Sequence[str]) -> Any:
        return self._batches[number]


def _load(folder: str, part: str | None) -> tuple[Any, list[str]]:
    """The dataset in a folder, or one of several, and its files. Raises: DataError."""
    datasets = import_package("datasets", "HuggingFaceDataset")
    try:
        loaded = datasets.load_from_disk(folder)
    except (OSError, ValueError, LookupError) as error:  # the last of a dataset without rows
        raise DataError(f"{folder}: expected a folder that save_to_disk of the package datasets wrote, got: {error}") from None
    names = list(loaded) if isinstance(loaded, datasets.DatasetDict) else None
    if (part is None) != (names is None) or (names is not None and part not in names):
        expected = f"one of {', '.join(names)}" if names is not None else "none, as the folder holds one dataset"
        raise DataError(f"part: expected {expected}, got {part!r} in {folder}")
    rows = loaded if names is None else loaded[part]
    files = [each["filename"] for each in rows.cache_files]
    if rows._indices is not None:  # as early versions of the package wrote
        rows = rows.flatten_indices(keep_in_memory=True)
    return rows, files


def _conversion(folder: str, feature: Any, name: str, text: TextClasses | None) -> tuple[Convert, list[str]]:
    """How a column of some type is converted, and the names of its classes, if it has them. Raises: DataError."""
    import datasets

    is_array = isinstance(feature, datasets.Array2D)
    axes = 2 if is_array else 0
    inner = datasets.Value(feature.dtype) if is_array else feature
    while isinstance(inner, (datasets.Sequence, datasets.List, datasets.LargeList)) and axes < 2:
        axes += 1
        inner = inner.feature
    is_text = isinstance(inner, datasets.Value) and inner.dtype in ("string", "large_string")
    if text is not None and not is_text:
        raise DataError(f"vocabulary: expected a column of strings, got {feature} in column {name!r} of {folder}")
    if isinstance(inner, datasets.Audio) and axes == 0:
        return sound(inner.sampling_rate, getattr(inner, "num_channels", None)), []
    if isinstance(inner, datasets.ClassLabel) and axes < 2:
        return numbers(max(axes, 1), "int32"), list(inner.names)
    if is_text and axes < 2:
        if text is None:
            return lambda value, where: numpy.array(list(value) if axes else [str(value)], dtype=object), []
        return text, text.labels
    if isinstance(inner, datasets.Value) and inner.dtype.startswith(("int", "uint", "float", "bool")):
        return numbers(max(axes, 1), inner.dtype), []
    raise DataError(
        f"columns: expected columns of numbers, lists and lists of lists of numbers, ClassLabel, strings, lists of strings or "
        f"Audio, got {feature} in column {name!r} of {folder} ('columns' names those to take)"
    )
