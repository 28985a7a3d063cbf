"""The first words of the demo's dictionary, converted as `make data` converts all of them."""

from collections.abc import Mapping
from pathlib import Path

from launching import ROOT

from hvdtrain.plugins.hdf_tools.dump import main

LAST = {"train": 1279, "dev": 299, "test": 299}
"""By part, the last word's number."""


def words_in(folder: Path, lasts: Mapping[str, int] = LAST) -> Path:
    """A folder with train.hdf, dev.hdf and test.hdf inside of another one, written when it is first asked for."""
    words = folder / "words"
    if not words.exists():
        words.mkdir()
        for part, last in lasts.items():
            source = f"{{'class': '{ROOT}/demos/g2p/words.py:Words', 'part': '{part}'}}"
            assert main([source, str(words / f"{part}.hdf"), "--end_seq", str(last)]) == 0
    return words
