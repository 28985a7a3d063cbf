"""What a job says and does when it gets SIGTERM."""

from __future__ import annotations

from hvdtrain.comm.base import Communicator
from hvdtrain.runtime.interrupt import Interrupt
from hvdtrain.runtime.mpirun import print_through_mpirun
from hvdtrain.runtime.watchdog import Watchdog


def mpirun_line(interrupt: Interrupt) -> str:
    """What is printed at once, as mpirun may kill the ranks before a checkpoint is written."""
    seconds = interrupt.seconds_to_save or 0.0  # without mpirun, it is not printed
    grace = interrupt.grace or 0.0
    saving = (
        f"A checkpoint takes {seconds:.1f} s, which is too long" if seconds > grace else "Saving a checkpoint, if there is time"
    )
    later = "a second later" if grace == 1 else f"{grace:g} s later"
    return (
        f"SIGTERM from mpirun, as after Ctrl-C: it kills the ranks {later} and returns 1. {saving} "
        "(kill -USR1 PID-OF-MPIRUN leaves time for it, and returns 75)"
    )


def act_on_sigterm(comm: Communicator, watchdog: Watchdog, interrupt: Interrupt) -> None:
    watchdog.stop_soon()
    # mpirun also sends SIGTERM after a rank has failed, which it reports itself.
    if comm.rank == 0 and not watchdog.ended_ranks(0.0):
        print_through_mpirun(mpirun_line(interrupt))
