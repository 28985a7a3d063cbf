"""`returnn.datasets`: the HDF writer for forward callbacks (`hdf`), and the labels of classes, read from RETURNN's vocabulary
files, with byte-pair encoding (`util.vocabulary`).
"""

from __future__ import annotations

import ast
import gzip
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hvdtrain.data.hdf.writer import UNKNOWN_DIM, HDFWriter
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError, DataError


class SimpleHDFWriter:
    """Writes batches to an HDF file in RETURNN's layout. The file exists once `close` has been called.

    Args:
        dim: number of features or classes; None if unknown.
        labels: names of the classes.
        ndim: number of axes without the batch: 1 for class indices, 2 for vectors; default: 2 if `dim` is given, else 1.
        extra_type: by name of an extra stream, its (dim, ndim, dtype).
        extra_labels: by name of an extra stream, the names of its classes.
    """

    def __init__(
        self,
        filename: str,
        dim: int | None,
        labels: Sequence[str] | None = None,
        ndim: int | None = None,
        *,
        extra_type: Mapping[str, tuple[int, int, str]] | None = None,
        extra_labels: Mapping[str, Sequence[str]] | None = None,
        swmr: bool = False,
        extend_existing_file: bool = False,
    ) -> None:
        if extend_existing_file:
            raise ConfigError.of(
                "unsupported", "SimpleHDFWriter: expected a file that does not exist yet, got extend_existing_file = True"
            )
        self._ndim = ndim if ndim is not None else 1 if dim is None else 2
        all_labels = {**({"data": labels} if labels else {}), **(extra_labels or {})}
        extra_dims = {name: dim or UNKNOWN_DIM for name, (dim, axes, _) in (extra_type or {}).items() if axes == 1}
        sparse = {"data": dim or UNKNOWN_DIM} if self._ndim == 1 else {}
        self._writer = HDFWriter(Path(filename), labels=all_labels, dims={**sparse, **extra_dims})
        self._writer.__enter__()
        self._is_open = True

    def insert_batch(
        self,
        inputs: Array,
        seq_len: Sequence[int] | Mapping[int, Sequence[int]],
        seq_tag: Sequence[str | bytes],
        extra: Mapping[str, Array] | None = None,
    ) -> None:
        """Write a batch of sequences.

        Args:
            inputs: shape (batch, time, dim), or (batch, time) for class indices.
            seq_len: number of frames of each sequence, shape (batch,); or a dict with these numbers for axis 0, the time axis.
            seq_tag: tag of each sequence.
            extra: further streams with the same lengths.
        """
        by_axis = seq_len if isinstance(seq_len, Mapping) else {0: seq_len}
        if inputs.ndim != self._ndim + 1 or list(by_axis) not in ([0], []):
            raise ConfigError.of(
                "wrong-result",
                f"SimpleHDFWriter: expected {self._ndim} axes and the batch, padded in time only, got {inputs.shape}, {by_axis}",
            )
        lengths = by_axis.get(0, [inputs.shape[1]] * len(seq_tag))
        for number, (tag, length) in enumerate(zip(seq_tag, lengths, strict=True)):
            arrays = {name: values[number][: int(length)] for name, values in {"data": inputs, **(extra or {})}.items()}
            self._writer.add(tag.decode("utf-8") if isinstance(tag, bytes) else str(tag), arrays)

    def close(self) -> None:
        """Finish and close the file."""
        if self._is_open:
            self._is_open = False
            self._writer.__exit__(None, None, None)

    def __enter__(self) -> SimpleHDFWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_open:
            self._is_open = False
            self._writer.__exit__(kind, error, trace)


class Vocabulary:
    """The labels of classes 0 to num_labels - 1.

    Args:
        vocab_file: a text file with one label per line, or with a Python dict {label: class}; optionally gzipped (.gz).
        unknown_label: label that replaces words outside of the vocabulary; None: such words raise an error.
        num_labels: the expected number of labels.
        seq_postfix: classes that `get_seq` appends.
        labels: the labels, instead of a file.

    Raises:
        ConfigError: neither a file nor labels are given.
        DataError: the file is malformed, or its labels do not match the other arguments.
    """

    def __init__(
        self,
        vocab_file: str | Path | None = None,
        *,
        unknown_label: str | None = "UNK",
        bos_label: str | int | None = None,
        eos_label: str | int | None = None,
        num_labels: int | None = None,
        seq_postfix: Sequence[int] | None = None,
        labels: Sequence[str] | None = None,
    ) -> None:
        if vocab_file is None and labels is None:
            raise ConfigError.of("missing", "Vocabulary: expected a vocab_file or labels, got neither")
        self.vocab_file = None if vocab_file is None else str(vocab_file)
        self.labels = list(labels) if labels is not None else _read(Path(str(vocab_file)))
        self.num_labels = len(self.labels)
        self._classes = {label: number for number, label in enumerate(self.labels)}
        if num_labels is not None and num_labels != self.num_labels:
            raise DataError(f"{vocab_file}: expected {num_labels} labels, got {self.num_labels}")
        self.unknown_label = unknown_label
        self.unknown_label_id = None if unknown_label is None else self.label_to_id(unknown_label)
        self.bos_label_id = self.to_id(bos_label)
        self.eos_label_id = self.to_id(eos_label)
        self.seq_postfix = list(seq_postfix or [])

    @classmethod
    def create_vocab(cls, **options: Any) -> Vocabulary:
        """Create a vocabulary from its options. Raises: ConfigError, for a class that hvdtrain does not have."""
        wanted = options.pop("class", "BytePairEncoding" if "bpe_file" in options else cls.__name__)
        classes = {kind.__name__: kind for kind in (Vocabulary, BytePairEncoding, CharacterTargets, Utf8ByteTargets)}
        if wanted not in classes:
            raise ConfigError.of(
                "unknown-value",
                f"Vocabulary.create_vocab: expected the class {' or '.join(classes)}, got {wanted!r} (docs/returnn.md)",
            )
        return classes[wanted](**options)

    def label_to_id(self, label: str) -> int:
        """The class of a label. Raises: DataError, if there is no such label."""
        if label not in self._classes:
            raise DataError(f"{self.vocab_file or 'labels'}: expected the label {label!r} in the vocabulary, got none")
        return self._classes[label]

    def to_id(self, label: str | int | None) -> int | None:
        """The class of a label; a class is returned unchanged."""
        return self.label_to_id(label) if isinstance(label, str) else label

    def id_to_label(self, number: int) -> str:
        return self.labels[number]

    def get_seq(self, sentence: str) -> list[int]:
        """The classes of labels separated by spaces."""
        return self.get_seq_indices(self._segments(sentence)) + self.seq_postfix

    def get_seq_indices(self, seq: Iterable[str]) -> list[int]:
        """The classes of labels. Raises: DataError, if there is no such label and none for unknown ones."""
        unknown = self.unknown_label_id
        return [self.label_to_id(label) if unknown is None else self._classes.get(label, unknown) for label in seq]

    def _segments(self, sentence: str) -> Iterable[str]:
        """The labels of a sentence."""
        return sentence.split()

    def get_seq_labels(self, seq: Sequence[int]) -> str:
        """The labels of classes, separated by spaces."""
        return " ".join(self.labels[number] for number in seq)


class CharacterTargets(Vocabulary):
    """A vocabulary whose labels are characters."""

    def __init__(self, vocab_file: str | Path | None = None, *, unknown_label: str | None = "@", **options: Any) -> None:
        super().__init__(vocab_file, unknown_label=unknown_label, **options)

    def _segments(self, sentence: str) -> Iterable[str]:
        return sentence

    def get_seq_labels(self, seq: Sequence[int]) -> str:
        return "".join(self.labels[number] for number in seq)


class Utf8ByteTargets(Vocabulary):
    """The 256 bytes of text in UTF-8 as classes."""

    def __init__(self, *, seq_postfix: Sequence[int] | None = None, **options: Any) -> None:
        super().__init__(labels=[chr(byte) for byte in range(256)], unknown_label=None, seq_postfix=seq_postfix, **options)

    def _segments(self, sentence: str) -> Iterable[str]:
        return map(chr, sentence.encode("utf-8"))

    def get_seq_labels(self, seq: Sequence[int]) -> str:
        return bytes(int(number) for number in seq).decode("utf-8")


END_OF_WORD = "</w>"
CONTINUES = "@@"


class BytePairEncoding(Vocabulary):
    """Parts of words, after Sennrich, Haddow and Birch, 2016, in the files of their program subword-nmt.

    Args:
        bpe_file: the merges, one pair per line, the first learned first; a first line `#version: 0.2` says how the end of a word
            is marked.

    Raises:
        DataError: a file is malformed.
    """

    def __init__(
        self, vocab_file: str | Path, bpe_file: str | Path, seq_postfix: Sequence[int] | None = None, **options: Any
    ) -> None:
        super().__init__(vocab_file, seq_postfix=seq_postfix, **options)
        try:
            lines = Path(bpe_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{bpe_file}: expected a pair to merge per line, got: {error}") from None
        version = lines.pop(0).split()[-1] if lines and lines[0].startswith("#version:") else "0.1"
        pairs = [tuple(line.split()) for line in lines]
        if version not in ("0.1", "0.2") or any(len(pair) != 2 for pair in pairs):
            raise DataError(f"{bpe_file}: expected a pair to merge per line, of version 0.1 or 0.2, got other lines")
        self._end_is_apart = version == "0.1"
        self._ranks = {pair: rank for rank, pair in reversed(list(enumerate(pairs)))}
        self._halves = {first + second: (first, second) for first, second in reversed(pairs)}
        self._known: dict[str, list[str]] = {}

    def _segments(self, sentence: str) -> Iterable[str]:
        inside = ""  # of a category: `$name {words}` stays as it is
        for word in sentence.split():
            if word[0] == "$" and len(word) > 1:
                inside = "$"
            elif inside and word[0] == "{":
                inside = "{"
            elif inside != "{" or word[0] == "}":
                inside = ""
            if inside:
                yield word
            else:
                if word not in self._known:
                    self._known[word] = self._parts(word)
                yield from self._known[word]

    def _parts(self, word: str) -> list[str]:
        """The parts of a word as labels: all but the last one end with @@."""
        parts = [*word, END_OF_WORD] if self._end_is_apart else [*word[:-1], word[-1] + END_OF_WORD]
        while len(parts) > 1:
            pair = min(zip(parts, parts[1:], strict=False), key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if pair not in self._ranks:
                break
            parts = _merged(parts, pair)
        if parts[-1] == END_OF_WORD:
            parts.pop()
        else:
            parts[-1] = parts[-1].removesuffix(END_OF_WORD)
        labels = [label for part in parts[:-1] for label in self._split(part, is_last=False)]
        return labels + self._split(parts[-1], is_last=True)

    def _split(self, part: str, is_last: bool) -> list[str]:
        """The part as a label, or if there is none, as those of the parts that it was merged from, as far as these are known."""
        label = part if is_last else part + CONTINUES
        halves = self._halves.get(part + END_OF_WORD if is_last else part)
        if label in self._classes or halves is None:
            return [label]
        first, second = halves
        return self._split(first, False) + self._split(second.removesuffix(END_OF_WORD) if is_last else second, is_last)


def _merged(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """The parts with every occurrence of a pair made one.

    >>> _merged(["a", "b", "a", "b", "a"], ("a", "b"))
    ['ab', 'ab', 'a']
    """
    merged: list[str] = []
    for part in parts:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return merged


def _read(path: Path) -> list[str]:
    """Read the labels in the order of classes. Raises: DataError."""
    try:
        text = gzip.decompress(path.read_bytes()).decode("utf-8") if path.suffix == ".gz" else path.read_text(encoding="utf-8")
        if not text.startswith("{"):
            return text.splitlines()
        classes = ast.literal_eval(text)
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path}: expected one label per line, or a dict {{label: class}}, got: {error}") from None
    if not isinstance(classes, Mapping) or sorted(classes.values()) != list(range(len(classes))):
        raise DataError(f"{path}: expected every class from 0 to the number of labels - 1 once, got other classes")
    return sorted(classes, key=lambda label: int(classes[label]))
