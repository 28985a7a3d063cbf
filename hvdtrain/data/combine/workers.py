"""Worker processes that answer questions in order."""

from __future__ import annotations

import atexit
import ctypes
import io
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hvdtrain.data.randomness import ALONE
from hvdtrain.data.types import imported_class
from hvdtrain.errors import STOP_SIGNALS, BrokenSequence, DataError, HvdtrainError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkContext, ForkProcess

AHEAD = 4
"""The number of questions that are queued per worker. They are small, so that writing them to a pipe never blocks."""

START_SECONDS = 20.0
"""How long a new process may take to answer before it is killed and started again."""

STARTS = 5
"""How many times a process is started before giving up."""

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal that a process gets when the thread that started it ends."""

Question = TypeVar("Question")


class Workers(Generic[Question]):
    """Processes that all do the same work. They are forked, so that functions of the config and the like need not be pickled:
    start them before the GPU is in use.

    A process that is forked while other threads run has copies of the locks that these hold, and no thread to release them: on
    rare occasions it waits forever, or crashes, inside Python or a library before it reaches our code. So each process reports
    that it has begun; one that does not is killed and started again.

    They end at `close`, or when this process ends in any way: the kernel then kills them, whatever they do. Closing the pipes
    would not be enough: processes that were forked later have copies, and a busy process does not look at its pipe.

    Args:
        work: returns the answer to a question. Both are pickled, by pickle itself: multiprocessing's pickler would leave tensors
            in shared memory, with a file descriptor for each.
    """

    def __init__(self, count: int, work: Callable[[Question], Any]) -> None:
        self._count = count
        self._work = work
        self._process = os.getpid()
        self._pipes: list[Connection] = []
        self._processes: list[ForkProcess] = []

    def start(self) -> None:
        import multiprocessing  # here, so that `--help` does not import it

        context = multiprocessing.get_context("fork")  # they inherit all they need: nothing is pickled
        # The kernel goes by the thread that forks, and other threads may end before the process does.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        for number in range(self._count):
            self._fork(context, number, parent)
        # If an error ends the program before `close`, Python would wait for the processes before it closes the pipes. The
        # function registered last runs first: multiprocessing's, which waits, is registered when a process starts.
        atexit.register(self.close)
        for number in range(self._count):
            for tries in range(1, STARTS + 1):
                failure = self._failure_to_begin(number)
                if failure is None:
                    break
                if tries == STARTS:
                    self.close()
                    raise RuntimeError(
                        f"worker process {number} was started {STARTS} times and {failure}: does another thread of this process "
                        "hold a lock?"
                    )
                self._processes[number].kill()
                self._processes[number].join()
                self._pipes[number].close()
                self._fork(context, number, parent)

    def _fork(self, context: ForkContext, number: int, parent: int | None) -> None:
        """Start a process; it replaces the one with this number, if any."""
        own_end, other_end = context.Pipe()
        inherited = [*(pipe for worker, pipe in enumerate(self._pipes) if worker != number), own_end]
        arguments = (self._work, other_end, inherited, parent)
        process = context.Process(target=_answer, args=arguments, name=f"map-worker-{number}", daemon=True)
        process.start()
        other_end.close()
        self._pipes[number : number + 1] = [own_end]
        self._processes[number : number + 1] = [process]

    def _failure_to_begin(self, number: int) -> str | None:
        """Wait until a new process reports that it has begun, and return None; or what happened instead."""
        if not self._pipes[number].poll(START_SECONDS):
            return f"did not begin within {START_SECONDS:g} s"
        try:
            self._receive(number)
        except WorkerDied as death:
            return f"did not begin: {death}"
        return None

    @property
    def is_usable(self) -> bool:
        """Whether this process started the workers: a process forked from it must not take their answers."""
        return bool(self._pipes) and self._process == os.getpid()

    def results(self, questions: Sequence[Question]) -> list[Any]:
        """The answers to the questions, in their order.

        Raises:
            DataError: the work raised it.
            RuntimeError: the work raised another exception, whose traceback is in the message, or a process died.
        """
        answers: list[Any] = []
        asked = received = 0
        try:
            for number in range(len(questions)):
                while asked < min(len(questions), number + AHEAD * self._count):
                    self._send(asked % self._count, questions[asked])
                    asked += 1
                received = number + 1
                kind, answer = self._receive(number % self._count)
                if kind == "broken sequence":
                    raise BrokenSequence(answer)
                if kind == "data error":
                    raise DataError(answer)
                if kind == "error":
                    raise RuntimeError(f"{answer}\n(raised in worker process {number % self._count})")
                answers.append(answer)
        except WorkerDied:
            raise
        except BaseException:
            for number in range(received, asked):  # discard them, so that the next question does not get an old answer
                self._receive(number % self._count)
            raise
        return answers

    def close(self) -> None:
        if self._process != os.getpid():
            return
        atexit.unregister(self.close)
        for pipe in self._pipes:
            with suppress(OSError):  # the process is gone
                pipe.send_bytes(pickle.dumps(None))
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
        self._pipes = []
        self._processes = []

    def _send(self, worker: int, question: Question) -> None:
        try:
            self._pipes[worker].send_bytes(_pickled(question))
        except OSError:
            raise self._death_of(worker) from None

    def _receive(self, worker: int) -> tuple[str, Any]:
        try:
            return pickle.loads(self._pipes[worker].recv_bytes())  # type: ignore[no-any-return]  # what `_answer` sends
        except (EOFError, OSError):
            raise self._death_of(worker) from None

    def _death_of(self, worker: int) -> WorkerDied:
        process = self._processes[worker]
        process.join(timeout=5)
        return WorkerDied(f"worker process {worker} ended with exit code {process.exitcode} (negative: by that signal)")


class WorkerDied(RuntimeError):
    """A worker process ended unexpectedly: it was killed, for example when memory ran out, or crashed in native code."""


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the one that started it ends."""
    with suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before prctl was called
        os._exit(1)


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, without the rest of the memory that they are a part of: PyTorch takes 160 us, this 50."""

    def reducer_override(self, value: Any) -> Any:
        is_tensor = type(value) is imported_class("torch", "Tensor")
        if not is_tensor or value.requires_grad or value.__dict__:  # attributes of the user
            return NotImplemented
        try:
            return sys.modules["torch"].from_numpy, (value.numpy(),)
        except (TypeError, RuntimeError):  # a type that numpy does not have, sparse, on another device
            return NotImplemented


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def _answer(work: Callable[[Any], Any], pipe: Connection, inherited: list[Connection], parent: int | None) -> None:
    """The main function of a worker process. It returns when None comes, or when the other end of the pipe is closed.

    Args:
        parent: the process to end with; None: end only when the pipe is closed.
    """
    if parent is not None:
        end_with(parent)
    # These signals reach all processes of a training; the main process saves a checkpoint and then ends the workers.
    for stopping in STOP_SIGNALS:
        signal.signal(stopping, signal.SIG_IGN)
    ALONE.has_them = True
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # OpenMP would wait forever for the threads of the process that this one was forked from
    for connection in inherited:  # left open in this process, they would keep their workers from ending
        connection.close()
    try:
        pipe.send_bytes(pickle.dumps(("began", None)))
    except OSError:
        return
    while True:
        try:
            question = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        if question is None:
            return
        try:
            answer = ("value", work(question))
        except BrokenSequence as error:
            answer = ("broken sequence", str(error))
        except HvdtrainError as error:
            answer = ("data error", str(error))
        except BaseException:
            answer = ("error", traceback.format_exc())
        try:
            packed = _pickled(answer)
        except Exception:  # an answer that cannot be pickled
            packed = pickle.dumps(("error", traceback.format_exc()))
        try:
            pipe.send_bytes(packed)
        except OSError:
            return
