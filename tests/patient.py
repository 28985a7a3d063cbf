"""Run under mpirun: rank 1 works for longer than the watchdog's patience while rank 0 has nothing to do.

`python patient.py progress|error|silence`: rank 1 tells of its progress; or it fails in the end; or it hangs.
"""

import sys
import time
from collections.abc import Callable

from hvdtrain.comm.base import run_with_heartbeat
from hvdtrain.comm.horovod import open_horovod
from hvdtrain.errors import DataError
from hvdtrain.runtime.watchdog import Watchdog

PATIENCE = 2.0


def work(progress: Callable[[int], None]) -> int:
    for number in range(10) if comm.rank == 1 else ():
        time.sleep(600 if sys.argv[1] == "silence" else PATIENCE / 5)
        progress(number)
    if comm.rank == 1 and sys.argv[1] == "error":
        raise DataError("planted by the test")
    return 10 + comm.rank


comm = open_horovod("torch")
with Watchdog(PATIENCE, comm.rank) as watchdog:
    try:
        print(comm.rank, run_with_heartbeat(comm, work, lambda numbers: watchdog.beat("working"), name="work"), flush=True)
    except DataError as error:
        print(comm.rank, error, error.on_every_rank, flush=True)
comm.close()
