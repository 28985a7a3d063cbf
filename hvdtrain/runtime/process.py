"""What hvdtrain may change in its process: everything if it has started the process, little in that of a calling program."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """The process of a job. The defaults are for the command line; `plugins/programs/` uses others.

    Attributes:
        is_own: the process exists for this job only: its stacks are printed when it crashes, and it exits if it hangs.
        handles_signals: SIGTERM, SIGUSR1 and Ctrl-C stop a training with a checkpoint; else the program handles them.
        log_handler: makes what the log goes to in place of stdout; None: it goes to stdout.
    """

    is_own: bool = True
    handles_signals: bool = True
    log_handler: Callable[[], logging.Handler] | None = None

    @property
    def prints_log(self) -> bool:
        """Whether the log goes to stdout."""
        return self.log_handler is None


OWN = Process()
