"""What hvdtrain may change of the process that it runs in: all of a process of its own, little of a calling program's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """The process of a job. The defaults are those of the command line; `api.py` has others.

    Attributes:
        is_own: the process is there for this job only: stacks are printed when it crashes, and it ends where it hangs.
        handles_signals: SIGTERM, SIGUSR1 and Ctrl-C stop a training with a checkpoint; else they do what they do in the program.
        prints_log: the log goes to stdout; else to the handlers of the program's `logging`.
    """

    is_own: bool = True
    handles_signals: bool = True
    prints_log: bool = True


OWN = Process()
