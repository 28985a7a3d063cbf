"""Sources that are read from beginning to end, whose epochs are orders of a corpus."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.data.dataset import Item, Scanning
from hvdtrain.data.types import Array, Stream
from hvdtrain.plugins.streams.reading import END, StreamReading
from hvdtrain.plugins.streams.streamed import open_streamed


class Corpus(StreamReading):
    """Words, which are class indices; each epoch begins at another one."""

    where, name = "train", "Corpus"

    def __init__(self, words: list[str]) -> None:
        super().__init__()
        self.words = words
        self.now: list[int] = []

    def begin(self, epoch: int, anew: bool) -> None:
        self.now = [(number + epoch) % len(self.words) for number in range(len(self.words))]

    def take(self, number: int) -> Any:
        return self.words[self.now[number]] if number < len(self.now) else END

    def sequence(self, number: int, item: Any) -> Item:
        return item, {"data": numpy.frombuffer(item.encode(), numpy.uint8)}

    def streams(self) -> Mapping[str, Stream]:
        return {"data": Stream(numpy.dtype(numpy.uint8), (), 256, sparse=True)}

    def order(self, epoch: int) -> tuple[Array, int] | None:
        self._begin(epoch)
        return numpy.array(self.now), zlib.crc32(self.all_tags().tobytes())

    def all_tags(self) -> Array:
        return numpy.array([word.encode() for word in self.words])


def read(words: list[str], folder: Path) -> tuple[list[list[str]], list[str]]:
    """The words of two epochs, whose tags are the same; and what is kept in the folder."""
    dataset = open_streamed(Corpus(words), "the same", Scanning(folder))
    found = []
    for now in map(dataset.at_epoch, (1, 2)):
        indices = range(now.num_sequences)
        found.append([bytes(arrays["data"]).decode() for arrays in now.sequences(indices)])
        assert now.tags(indices) == found[-1]
    dataset.close()
    return found, sorted(path.name.partition(".")[2] for path in folder.glob("*.index"))


def test_a_corpus_is_kept_once_and_another_one_is_not_taken_for_it(tmp_path: Path) -> None:
    """Though its identity is the same, as of a file that its reader finds by itself."""
    kept = [["epoch-1.index"], ["epoch-1.index", "varying-1.index", "varying-2.index"]]
    for text, files in zip(("eins zwei drei vier f sechs", "one two three four five six"), kept, strict=True):
        words = text.split()
        for _ in range(2):
            assert read(words, tmp_path) == ([words[1:] + words[:1], words[2:] + words[:2]], files)
