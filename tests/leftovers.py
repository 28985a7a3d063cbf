"""What a test must not leave: processes, threads, variables of the environment, files outside of tmp_path.

A process that runs tests becomes the parent of what the programs of a test leave (PR_SET_CHILD_SUBREAPER), so that it sees these,
too. It has a folder for temporary files of its own, which is as before after every test.
"""

import contextlib
import ctypes
import gc
import getpass
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37

PATIENCE = 5.0
"""Seconds in which processes and threads that are ending have to end."""

PATIENCE_WITH_ENDING = 60.0
"""The same for processes that run no code any more: on a busy machine, it takes long to free much memory."""

FREE = {
    "PYTEST_CURRENT_TEST",
    "PATH",
    *("ENABLE_RUNTIME_UPTIME_TELEMETRY", "TF2_BEHAVIOR", "TPU_ML_PLATFORM", "TPU_ML_PLATFORM_VERSION"),
    *("HDF5_PLUGIN_PATH", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK"),
}
"""Variables that pytest sets, and those that libraries set when they are imported (TensorFlow, hdf5plugin, OpenMP, PyTorch,
what looks for ffmpeg, and Lightning)."""

CACHES = (
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    "torchelastic_",  # torchrun's logs
    "torchinductor_",
    "__autograph_",
    "pymp-",
    getpass.getuser(),
)
"""How the names of files and folders begin that Python, the tools, PyTorch, TensorFlow and RETURNN keep while a process lives."""

KEPT_THREADS = re.compile(r"tqdm_monitor|fsspecIO|asyncio_\d|.*\(process_request_thread\)")
"""The names of threads that libraries keep while a process lives."""


@dataclass(frozen=True)
class State:
    """What there is at one time: numbers of processes, threads, variables, files, the working directory."""

    processes: frozenset[int]
    threads: frozenset[threading.Thread]
    environment: dict[str, str]
    files: frozenset[Path]
    directory: str | None


@dataclass(frozen=True)
class TestProcess:
    """A process that runs tests, one after the other.

    Attributes:
        folders: whose files it looks at. The first is that of its own temporary files, from which it removes what is left; the
            others are not only its own.
    """

    __test__ = False  # pytest would take it for tests

    folders: Sequence[Path]

    @classmethod
    @contextlib.contextmanager
    def of_this_session(cls, folders: Sequence[Path]) -> Iterator["TestProcess"]:
        """This process, which gets a folder for its temporary files, and for those of the programs that it starts."""
        before, reaps = (os.environ.get("TMPDIR"), tempfile.tempdir), ctypes.c_int()
        libc = ctypes.CDLL(None)
        libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(reaps), 0, 0, 0)
        with tempfile.TemporaryDirectory(prefix="hvdtests-", ignore_cleanup_errors=True) as folder:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            os.environ["TMPDIR"], tempfile.tempdir = folder, None
            try:
                yield cls((Path(folder), *folders))
            finally:
                libc.prctl(PR_SET_CHILD_SUBREAPER, reaps.value, 0, 0, 0)
                os.environ.pop("TMPDIR")
                if before[0] is not None:
                    os.environ["TMPDIR"] = before[0]
                tempfile.tempdir = before[1]

    def state(self) -> State:
        try:
            directory = os.getcwd()
        except OSError:  # it is removed
            directory = None
        return State(
            frozenset(children()),
            frozenset(one for one in threading.enumerate() if not is_kept(one)),
            {name: value for name, value in os.environ.items() if name not in FREE},
            frozenset(path for folder in self.folders for path in folder.glob("*") if not path.name.startswith(CACHES)),
            directory,
        )

    @contextlib.contextmanager
    def checked(self, kills: bool = False) -> Iterator[None]:
        """Around a test. Raises: AssertionError, if it left something; that is ended, removed or set back.

        Args:
            kills: the test kills programs, which leave their temporary files: these are removed without an error.
        """
        before = self.state()
        yield
        left = [what for what in self._tidy(before) if not (kills and what.startswith(f"the file {self.folders[0]}"))]
        if left:
            raise AssertionError("the test left " + "; ".join(left))

    def _tidy(self, before: State) -> list[str]:
        """End, remove and set back what there was not before; what that was."""
        after = self.state()
        began = time.monotonic()
        while new := after.processes - before.processes | after.threads - before.threads:
            only_ending = all(isinstance(one, int) and not command_of(one) for one in new)
            if time.monotonic() - began > (PATIENCE_WITH_ENDING if only_ending else PATIENCE):
                break
            gc.collect()  # what executors and generators in cycles hold
            time.sleep(0.02)
            after = self.state()
        found = [f"the thread {one.name}" for one in after.threads - before.threads]
        while left := frozenset(children()) - before.processes:  # one that is killed may leave its own children
            for pid in sorted(left):
                found.append(f"the process {pid}: {command_of(pid)}")
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            while left & frozenset(children()):
                time.sleep(0.01)
        for path in sorted(after.files - before.files):
            found.append(f"the file {path}")
            if path.parent != self.folders[0]:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if names := {name for name, _ in after.environment.items() ^ before.environment.items()}:
            found.append(f"the environment with another {', '.join(sorted(names))}")
            for name in names:
                os.environ.pop(name, None)
            os.environ.update(before.environment)
        if after.directory != before.directory and before.directory is not None:
            found.append(f"the working directory {after.directory}")
            os.chdir(before.directory)
        return found


def children() -> Iterator[int]:
    """The processes whose parent is this one, without those that have ended and are not waited for, and multiprocessing's own."""
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            for pid in map(int, path.read_text().split()):
                if is_running(pid) and "multiprocessing.resource_tracker" not in command_of(pid):
                    yield pid


def is_kept(thread: threading.Thread) -> bool:
    """Whether a thread is a library's that lives as long as the process, or is not Python's."""
    return KEPT_THREADS.match(thread.name) is not None or isinstance(thread, threading._DummyThread)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200].strip()
    except OSError:
        return "which has just ended"
