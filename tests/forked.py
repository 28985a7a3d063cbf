"""The program in a child of the tests' process: a crash and an endless loop are seen from outside."""

import os
import pickle
import resource
import signal
from collections.abc import Sequence

from launching import Finished


def run_forked(arguments: Sequence[object], seconds: int = 60) -> Finished:
    """What `python -m hvdtrain ARGUMENTS` prints and returns. A status below 0 is a signal's.

    Args:
        seconds: of a core that it may take; it may wait for six times as long, beside other programs.
    """
    from inside import run_inside  # here, as it imports PyTorch

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(6 * seconds)
            used = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime + resource.getrusage(resource.RUSAGE_SELF).ru_stime)
            resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, used + seconds))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            finished = run_inside(arguments)
            with open(writer, "wb") as pipe:
                pickle.dump(finished, pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        got = pipe.read()
    _, ended = os.waitpid(child, 0)
    status = os.waitstatus_to_exitcode(ended)
    return pickle.loads(got) if got else Finished(status or 1, "", f"ended without a word, with status {status}", 0.0)
