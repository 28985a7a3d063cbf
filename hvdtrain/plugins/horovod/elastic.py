"""Continuing under Horovod's elastic driver after a rank was lost.

The driver (`horovodrun --min-np 2 --host-discovery-script hosts.sh ...`) keeps the processes of the surviving ranks, and
expects them to reconnect. Here, such a process asks the driver for its new rank and then replaces itself by a new program
(exec), which continues from the newest checkpoint (`start_again`). So no state of the old connection remains.
Reference: horovod/runner/elastic/{driver,rendezvous,registration}.py of Horovod 0.28.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

DRIVER_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
"""The fields of the elastic driver's answer, in this order."""

SCOPE = "hvdtrain"
"""The scope of our own entries in the driver's store, which it clears whenever it reassigns the ranks."""

ASK_TIMEOUT = 1200.0
"""Seconds to wait for the new rank. The driver answers once all ranks have asked or ended; it has a timeout, too."""

STOP_SIGNAL = signal.SIGUSR1
"""The signal on which a training stops with a checkpoint."""


def report_error(environ: Mapping[str, str]) -> None:
    """Report to the other ranks that this one ends with an error that would repeat: the driver takes it for a lost host."""
    _put(environ, "error", "1")


def start_again(environ: Mapping[str, str], *, after_stop: bool) -> str:
    """Continue as a new program with the rank that the driver assigns. Returns only if there is none: the reason to end.

    Args:
        after_stop: the training was stopped with a checkpoint. Then it continues only if the reason was a change of the hosts.
    """
    _end_connections()
    if _get(environ, f"/{SCOPE}/error") is not None:
        return "an error of another rank"
    if after_stop and _get(environ, f"/{SCOPE}/hosts") is None:
        return "stopped on request"
    answer = _get(environ, f"/rank_and_size/{environ['HOROVOD_HOSTNAME']}:{environ['HOROVOD_LOCAL_RANK']}", ASK_TIMEOUT)
    assigned = dict(zip(DRIVER_NAMES, (answer or b"").decode("ascii").split(","), strict=False))
    if len(assigned) < len(DRIVER_NAMES) or int(assigned["RANK"]) < 0:
        return "Horovod's driver has no rank for this process any more"
    sys.stderr.write(f"rank {environ['HOROVOD_RANK']} continues as rank {assigned['RANK']} of {assigned['SIZE']}\n")
    sys.stderr.flush()
    sys.stdout.flush()
    for number in _open_files():  # do not close them here: Horovod's threads use them until the new program begins
        with suppress(OSError):
            os.set_inheritable(number, False)
    variables = {f"HOROVOD_{name}": value for name, value in assigned.items()}
    return os.execve(sys.executable, sys.orig_argv, {**environ, **variables})


def _end_connections() -> None:
    """Shut down the connections to other ranks: one without a connection to the lost rank would wait for Gloo's timeout."""
    for number in _open_files():
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.getpeername()  # fails unless it is a connection
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.shutdown(socket.SHUT_RDWR)


def _open_files() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]


def watch_hosts(environ: Mapping[str, str]) -> None:
    """From now on, stop the training with a checkpoint when the driver reports a change of the hosts.

    Call this as early as possible, as the driver does not repeat a report. It notifies rank 0, which makes the others stop, too.
    """
    from horovod.runner.elastic.worker import WorkerNotificationManager

    class Listener:
        def on_hosts_updated(self, timestamp: int, result: int) -> None:
            _put(environ, "hosts", str(timestamp))
            if callable(signal.getsignal(STOP_SIGNAL)):
                os.kill(os.getpid(), STOP_SIGNAL)

    manager = WorkerNotificationManager()
    manager.init()
    manager.register_listener(Listener())


def stop_for_other_hosts(environ: Mapping[str, str]) -> None:
    """On rank 0: stop the training that begins if the hosts have changed already. Its signal handlers have to be set by now."""
    if _get(environ, f"/{SCOPE}/hosts") is not None:
        os.kill(os.getpid(), STOP_SIGNAL)


def _get(environ: Mapping[str, str], path: str, timeout: float = 10.0) -> bytes | None:
    """An entry of the driver's store; None if there is no such entry, or the driver has ended."""
    status, answer = _ask_driver(environ, "GET", path, None, timeout)
    return answer if status == 200 else None


def _put(environ: Mapping[str, str], name: str, value: str) -> None:
    _ask_driver(environ, "PUT", f"/{SCOPE}/{name}", value, 10.0)


def _ask_driver(environ: Mapping[str, str], method: str, path: str, body: str | None, timeout: float) -> tuple[int, bytes]:
    address = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    port = int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    for pause in (0.2, 1.0, 0.0):
        answer = request(address, port, method, path, body, timeout)
        if answer is not None:
            return answer
        time.sleep(pause)
    return 0, b""


def request(address: str, port: int, method: str, path: str, body: str | None, timeout: float) -> tuple[int, bytes] | None:
    """Send a request to an HTTP server; return the status and the content of its answer, or None if it does not answer."""
    import http.client  # imported here, as every start of the program imports this file, but few talk to a server

    connection = http.client.HTTPConnection(address, port, timeout=timeout)  # unlike urllib, it uses no proxy
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
