"""Finding the lengths of sequences by reading them, with log lines, a progress bar and beats of the watchdog."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from hvdtrain.comm import this_process
from hvdtrain.comm.base import Communicator
from hvdtrain.data.dataset import Scanning
from hvdtrain.data.formats.found import FINDERS
from hvdtrain.runtime import log
from hvdtrain.runtime.bars import bars
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.settings import Settings

WORTH_A_LINE = 1.0
"""Reading all items for their lengths is logged if it takes more than this many seconds."""


def open_scanning(settings: Settings, comm: Communicator, watchdog: Watchdog | None) -> Scanning:
    """For datasets whose lengths are found by reading them: rank 0 shows a bar, and the watchdog gets beats."""
    beat = partial(_beat, watchdog)
    finder = FINDERS.last
    folder = None if finder is None else finder.folder(settings)
    cores = this_process.cores()
    processes = cores if this_process.is_bound() else max(1, cores // comm.local_size)
    progress = partial(_progress, comm.rank == 0, beat)
    seed = settings.run.random_seed
    return Scanning(folder, comm.rank, comm.size, progress, beat, lambda line: log.info(line), processes, cores, seed=seed)


def _beat(watchdog: Watchdog | None) -> None:
    if watchdog is not None:
        watchdog.beat("finding the lengths of sequences")


@contextmanager
def _progress(has_bar: bool, beat: Callable[[], None], name: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show progress while a dataset is read; yield a function to call with the number of items read since the last call."""
    began = time.monotonic()
    is_logged = False
    with bars().count("finding lengths", total, "seq") if has_bar else nullcontext(lambda number: None) as count:

        def advance(number: int) -> None:
            nonlocal is_logged
            beat()
            if not is_logged and time.monotonic() - began > WORTH_A_LINE:
                is_logged = True
                log.info(f"{name}: all of it is read once ...")
            count(number)

        yield advance
