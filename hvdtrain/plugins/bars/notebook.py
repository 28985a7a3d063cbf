"""A progress bar in a notebook, in place of the terminal's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from hvdtrain.plugins.bars.terminal import configured_tqdm
from hvdtrain.runtime.bars import EVERY


@contextmanager
def open_notebook() -> Iterator[Notebook]:
    """The running cell, for bars."""
    if find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm
    else:
        from tqdm import tqdm  # drawn as text
    with configured_tqdm(tqdm):
        yield Notebook(tqdm)


class Notebook:
    """The output of a notebook's cell: `Terminal` of `terminal.py`, with tqdm's widget.

    Args:
        tqdm: the class of the bars.
    """

    columns = 120

    def __init__(self, tqdm: Any) -> None:
        self._tqdm = tqdm

    def bar_format(self, share: float) -> str:
        """tqdm's format, with the share that is done, from 0 to 1."""
        return f"{{desc}}: {share:4.0%}|{{bar}}{{r_bar}}"

    def bar(self, **options: Any) -> Any:
        """A tqdm bar; rates are means. Unlike in a terminal, it stays, like everything that a cell prints."""
        return self._tqdm(mininterval=EVERY, smoothing=0, **options)
