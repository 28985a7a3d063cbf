"""Run under mpirun: rank 1 works for longer than the watchdog's patience while rank 0 has nothing to do.

`python patient.py progress error`: rank 1 reports its progress twice, and fails in the end. `silence`: it hangs. In the
end, rank 1 closes its connection late, and the ranks have the exit status of a training that was stopped.
"""

import sys
import time
from collections.abc import Callable
from functools import partial

from hvdtrain.errors import DataError
from hvdtrain.plugins.copies.heartbeat import run_with_heartbeat
from hvdtrain.plugins.horovod.communicator import open_horovod
from hvdtrain.plugins.watchdog.watchdog import JobWatchdog

PATIENCE = 1.0


def work(how: str, progress: Callable[[int], None]) -> int:
    for number in range(10) if comm.rank == 1 else ():
        time.sleep(600 if how == "silence" else PATIENCE / 5)
        progress(number)
    if comm.rank == 1 and how == "error":
        raise DataError("planted by the test")
    return 10 + comm.rank


if __name__ == "__main__":  # the search for doctests imports it, too
    comm = open_horovod("torch")
    for how in sys.argv[1:]:
        with JobWatchdog(PATIENCE, comm.rank) as watchdog:
            try:
                done = run_with_heartbeat(
                    comm, partial(work, how), lambda numbers: watchdog.beat("working", "steps"), name="work"
                )
                print(f"{comm.rank} {how} {done}\n", end="", flush=True)  # in one piece
            except DataError as error:
                print(f"{comm.rank} {how} {error} {error.on_every_rank}\n", end="", flush=True)
    if comm.rank == 1:
        time.sleep(2)
        print("1 closes\n", end="", flush=True)
    comm.close()
    sys.exit(75)
