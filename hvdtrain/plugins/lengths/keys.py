"""The key of the folder with what was found about sources of data."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.config.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class LengthKeys(Section):
    """Lengths that are found by reading the data."""

    lengths_dir: str | None = key(
        "~/.cache/hvdtrain/lengths",
        "folder for lengths of sequences that are only known from reading the data (iterables, items that take long to read, "
        "datasets that RETURNN reads); jobs may share it; None: they are found in every run",
    )
