"""`returnn.datasets.util.vocabulary`: the labels of classes, read from RETURNN's vocabulary files."""

from __future__ import annotations

import ast
import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.errors import ConfigError, DataError


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
            raise ConfigError(["Vocabulary: expected a vocab_file or labels, got neither"])
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
        """Create a vocabulary from its options. Raises: ConfigError, for RETURNN's other vocabulary classes."""
        wanted = options.pop("class", "BytePairEncoding" if "bpe_file" in options else "Vocabulary")
        if wanted != "Vocabulary":
            raise ConfigError([f"Vocabulary.create_vocab: expected the class Vocabulary, got {wanted!r} (docs/returnn.md)"])
        return cls(**options)

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
        unknown = self.unknown_label_id
        known = [self.label_to_id(label) if unknown is None else self._classes.get(label, unknown) for label in sentence.split()]
        return known + self.seq_postfix

    def get_seq_labels(self, seq: Sequence[int]) -> str:
        """The labels of classes, separated by spaces."""
        return " ".join(self.labels[number] for number in seq)


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
