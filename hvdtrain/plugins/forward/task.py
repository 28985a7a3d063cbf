"""The tasks forward and search."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hvdtrain.comm.base import Communicator
from hvdtrain.config.plugins import Registry
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.forward import ForwardKeys
from hvdtrain.plugins.forward.outputs import WriterMaker, forward
from hvdtrain.runtime import log
from hvdtrain.runtime.scores import text
from hvdtrain.runtime.timer import clock_text
from hvdtrain.settings import Settings
from hvdtrain.start_up.job import open_session

WRITERS: Registry[Callable[[Settings], WriterMaker | None]] = Registry("writers")
"""Those of plug-ins."""


def forward_all(settings: Settings, comm: Communicator | None = None) -> dict[str, float]:
    """Run the config's forward_step over forward_data or search_data; return the scores of a search. Raises: HvdtrainError.

    Args:
        comm: ranks that are connected already; None: connect them as the config says.
    """
    if settings.forward is None:
        raise ConfigError.of("missing", "forward_data: expected a dataset, got None")
    with open_session(settings, "forward", comm) as session:
        began = time.perf_counter()
        [feed] = session.feeds
        epoch = max(1, session.progress.epoch)
        prefix = Path(settings.run.model)
        makers = [maker for make in WRITERS.values() if (maker := make(settings)) is not None]
        keys = settings.of(ForwardKeys)
        steps, means = forward(session.comm, session.learner, session.watchdog, feed, epoch, keys, prefix, makers)
        if means:
            log.result(f"epoch {epoch} {settings.run.task}: {feed.name}: {text(means)}")
        log.info(f"Forward {steps} steps, {clock_text(time.perf_counter() - began)} elapsed")
        return means
