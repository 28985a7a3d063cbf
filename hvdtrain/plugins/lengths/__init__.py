"""Lengths that nothing but reading shows: found by several processes, once, and kept in `lengths_dir`, as other facts are."""

from dataclasses import dataclass

from hvdtrain.config.keys import Section, key
from hvdtrain.config.plugins import Plugin


@dataclass(frozen=True, kw_only=True)
class LengthKeys(Section):
    """Lengths that are found by reading the data."""

    lengths_dir: str | None = key(
        "~/.cache/hvdtrain/lengths",
        "folder for lengths of sequences that are only known from reading the data (iterables, items that take long to read, "
        "datasets that RETURNN reads); jobs may share it; None: they are found in every run",
    )


PLUGIN = Plugin(lengths={"lengths_dir": f"{__name__}.find:FINDER"}, keys={"lengths": LengthKeys})
