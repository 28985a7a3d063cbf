"""Transcripts as class indices: of characters or words, or of a SentencePiece model or a tokenizer of Hugging Face."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.config.missing import import_package
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import BrokenSequence, DataError
from hvdtrain.plugins.speech.tables import Table
from hvdtrain.plugins.speech.vocabulary import Units, Vocabulary, check_distinct, read_lines, split

SPACE = "<space>"
"""The entry of a vocabulary of characters that stands for a space, as in ESPnet."""


class TextEncoder(ABC):
    """Turns a text into an array.

    Attributes:
        stream: of the arrays.
    """

    stream: Stream

    def length(self, text: str, where: str) -> int:
        """The length of `encode`. Raises: BrokenSequence, naming `where`."""
        return len(self.encode(text, where))

    @abstractmethod
    def encode(self, text: str, where: str) -> Array:
        """The array. Raises: BrokenSequence, naming `where`."""


class RawText(TextEncoder):
    """The text itself, as one frame."""

    stream = Stream(numpy.dtype(object), (), 1, sparse=False)

    def encode(self, text: str, where: str) -> Array:
        return numpy.array([text], dtype=object)


class UnitEncoder(TextEncoder):
    """The classes of the characters or words of a text."""

    def __init__(self, vocabulary: Vocabulary, units: Units) -> None:
        self._vocabulary = vocabulary
        self._units = units
        self._entries = frozenset(vocabulary.entries)
        self._space = SPACE if units == "characters" and SPACE in vocabulary.entries else " "
        self.stream = _classes(vocabulary.entries)

    def misfit(self, texts: Iterable[str]) -> str:
        """What to say if most units of some texts are not in the vocabulary; '': nothing."""
        return self._vocabulary.misfit(self._units_of(text) for text in texts)

    def length(self, text: str, where: str) -> int:
        return len(self._split(text, where))

    def encode(self, text: str, where: str) -> Array:
        return self._vocabulary.classes(self._split(text, where))

    def _split(self, text: str, where: str) -> list[str]:
        units = self._units_of(text)
        if self._entries.issuperset(units):  # several times as fast as the check
            return units
        try:
            self._vocabulary.check(units, where, text[:40])
        except DataError as error:
            raise BrokenSequence(str(error)) from None
        return units

    def _units_of(self, text: str) -> list[str]:
        units = split(text, self._units)
        return units if self._space == " " else [self._space if unit == " " else unit for unit in units]


class Tokens(TextEncoder):
    """The tokens of a SentencePiece model (.model) or of a tokenizer of Hugging Face (.json).

    Raises:
        DataError: the package is not installed, or the file cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._encode, entries = _sentencepiece(path) if str(path).endswith(".model") else _tokenizer(path)
        self.stream = _classes(entries)

    def encode(self, text: str, where: str) -> Array:
        return numpy.asarray(self._encode(text), dtype=numpy.int32)

    def __reduce__(self) -> tuple[type[Tokens], tuple[str | Path]]:
        return type(self), (self._path,)


def _classes(entries: Sequence[str]) -> Stream:
    return Stream(numpy.dtype(numpy.int32), (), len(entries), sparse=True, labels=tuple(entries))


def _sentencepiece(path: str | Path) -> tuple[Callable[[str], list[int]], list[str]]:
    sentencepiece = import_package("sentencepiece", str(path))
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise DataError(f"{path}: expected a model of SentencePiece, got: {error}") from None
    return model.encode, [model.id_to_piece(number) for number in range(model.vocab_size())]


def _tokenizer(path: str | Path) -> tuple[Callable[[str], list[int]], list[str]]:
    tokenizers = import_package("tokenizers", str(path))
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.no_truncation()  # which a tokenizer.json may ask for: a transcript is neither cut nor filled up
        tokenizer.no_padding()
        dropout = getattr(tokenizer.model, "dropout", None)
    except Exception as error:  # the package raises Exception itself
        raise DataError(f"{path}: expected a tokenizer.json of Hugging Face, got: {error}") from None
    if dropout:
        raise DataError(f"{path}: expected a tokenizer without dropout, which changes the length of a text, got {dropout:g}")
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)  # ids may have gaps
    entries = [tokenizer.id_to_token(number) or "" for number in range(highest + 1)]
    return lambda text: list(tokenizer.encode(text).ids), entries


def text_encoder(units: str, vocabulary: Any, vocabulary_from: Any) -> TextEncoder:
    """The encoder of a kind of units, given one of the two, unless the units are whole texts. Raises: DataError."""
    if units == "text":
        return RawText()
    kind: Units = "words" if units == "words" else "characters"
    if vocabulary_from is not None:
        path = Path(vocabulary_from)
        table = Table(path, may_be_empty=True)
        units_seen = {unit for position in range(len(table.ids)) for unit in split(table.value(position), kind)}
        if not units_seen:
            raise DataError(f"{path}: expected transcripts, got none")
        return UnitEncoder(Vocabulary(str(path), sorted(units_seen)), kind)
    if isinstance(vocabulary, (str, Path)):
        if str(vocabulary).endswith((".model", ".json")):
            return Tokens(vocabulary)
        return UnitEncoder(Vocabulary(str(vocabulary), read_entries(Path(vocabulary))), kind)
    return UnitEncoder(Vocabulary("vocabulary", [str(entry) for entry in vocabulary]), kind)


NUMBERED = re.compile(r"(\S+)\s+(\d+)")


def read_entries(path: Path) -> list[str]:
    """The entries of a token list, by class: a line each, either the entry or `entry number`. Raises: DataError."""
    lines = read_lines(path)
    numbered = [NUMBERED.fullmatch(line.strip()) for line in lines]
    if all(numbered):
        by_number = {int(match[2]): match[1] for match in numbered if match}
        if sorted(by_number) == list(range(len(lines))):
            lines = [by_number[number] for number in range(len(lines))]
    return check_distinct(path, lines)
