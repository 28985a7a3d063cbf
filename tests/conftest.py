"""What several tests need: a small corpus of sequences of different lengths."""

import ast
import contextlib
import fcntl
import gc
import importlib
import inspect
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
from launching import ROOT, finish, hvdtrain, in_turn, launch, locked, torchrun
from leftovers import TestProcess
from object_store import ObjectStore, object_store
from terminal import Terminal
from times import Times
from trainings import Trained, named_by, names_in

from hvdtrain.config.large_imports import SELDOM

# torch with CUDA imports triton, which ends in a segmentation fault in a process that has TensorFlow loaded (triton 3.7 and
# TensorFlow 2.21). The other order works. A training loads one framework only, but a worker runs the tests of both.
with contextlib.suppress(ImportError):
    importlib.import_module("triton")

USUAL = gc.get_threshold()
gc.set_threshold(*SELDOM)  # until the tests are collected: their modules import PyTorch and TensorFlow


def write_corpus(path: Path, num_sequences: int, seed: int) -> None:
    """Frames of 4 features, a class of 5 for every frame, and the sequence's number as a separate key."""
    from hvdtrain.plugins.hdf_tools.writer import HDFWriter  # here, as the core's tests run without it

    generator = numpy.random.default_rng(seed)
    with HDFWriter(path, dims={"classes": 5, "id": num_sequences}) as writer:
        for number in range(num_sequences):
            length = int(generator.integers(1, 13))
            classes = generator.integers(0, 5, length).astype(numpy.int32)
            frames = generator.normal(size=(length, 4)).astype(numpy.float32)
            frames[:, 0] += classes
            writer.add(f"seq-{number}", {"data": frames, "classes": classes, "id": numpy.array([number], numpy.int32)})


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of pytest-xdist share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def corpus(shared_folder: Path) -> Path:
    """A folder with train.hdf (231 sequences: no multiple of 12), even.hdf (240), two.hdf (2) and dev.hdf (101)."""
    folder = shared_folder / "corpus"
    with locked(folder.with_suffix(".lock"), fcntl.LOCK_EX):
        if not folder.exists():
            folder.mkdir()
            for seed, (name, size) in enumerate({"train": 231, "even": 240, "two": 2, "dev": 101}.items()):
                write_corpus(folder / f"{name}.hdf", size, seed)
    return folder


@pytest.fixture(scope="module")
def running_store() -> Iterator[ObjectStore]:
    with object_store() as running:
        yield running


@pytest.fixture
def store(running_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """An empty object store; this process notices failures soon, and tries again twice, at once."""
    from hvdtrain.plugins.remote import files as remote  # here, as the core's tests run without it

    running_store.clear()
    monkeypatch.setattr(remote, "TIMEOUT", 3.0)
    monkeypatch.setattr(remote, "PAUSES", (0.01, 0.01))
    return running_store


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", metavar="FILE", help="print what the tests of each folder took, and write what each test took")
    parser.addoption("--soak", action="store_true", help="the tests marked soak and again, whole")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Tell how to repeat what is random (a header would not be printed with -q)."""
    if (file := config.getoption("--times")) is not None:
        times = config.pluginmanager.getplugin("times")
        times.write(Path(file))
        for line in times.lines():
            terminalreporter.write_line(line)
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    if any("fuzz" in report.keywords for report in reports):
        seed = os.environ["HVDTRAIN_FUZZ_SEED"]
        terminalreporter.write_line(f"tests marked fuzz: HVDTRAIN_FUZZ_SEED={seed} makes the same cases again")


def pytest_configure(config: pytest.Config) -> None:
    """Tests marked fuzz draw the same cases every time, unless HVDTRAIN_FUZZ_SEED has another seed, or "new" (fuzzing.py).

    A shell without job control has background commands ignore SIGINT, and their children after them: `make test &`.
    """
    if os.environ.setdefault("HVDTRAIN_FUZZ_SEED", "1") == "new":
        os.environ["HVDTRAIN_FUZZ_SEED"] = str(random.SystemRandom().randrange(10**9))  # which the workers inherit
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(Times(), "times")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays, and need not be searched for garbage again and again.

    RETURNN's code for TensorFlow switches off eager execution when it is imported, for all tests of the process.
    """
    if "returnn.tf" in sys.modules and any(item.path.parent.name == "tensorflow" for item in session.items):
        raise pytest.UsageError("expected no test module to import returnn.tf while tests are collected: do it in a function")
    gc.set_threshold(*USUAL)
    gc.freeze()


@pytest.fixture(autouse=True)
def _in_turn(request: pytest.FixtureRequest, shared_folder: Path) -> Iterator[None]:
    with in_turn(shared_folder, alone=request.node.get_closest_marker("quiet") is not None):
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Have TensorFlow, if a module imported it, compute in one thread: a test may use it before another one says how many."""
    if "tensorflow" in sys.modules:
        _set_one_thread()


def _set_one_thread() -> None:
    threading = sys.modules["tensorflow"].config.threading
    with contextlib.suppress(RuntimeError):  # it has computed already
        threading.set_intra_op_parallelism_threads(1)
        threading.set_inter_op_parallelism_threads(1)


@pytest.fixture(autouse=True)
def _eagerly() -> None:
    """Switch eager execution and the shapes of TensorFlow 2 on again, if RETURNN's code was imported in a test before."""
    if "returnn.tf" in sys.modules and not (tensorflow := sys.modules["tensorflow"]).executing_eagerly():
        tensorflow.compat.v1.reset_default_graph()
        tensorflow.compat.v1.enable_eager_execution()
        tensorflow.compat.v1.enable_v2_tensorshape()
        _set_one_thread()  # of the new context


@pytest.fixture(scope="session")
def _process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestProcess]:
    tmp_path_factory.getbasetemp()  # which is not among the temporary files of this process
    with TestProcess.of_this_session((ROOT,)) as process:
        yield process


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest, _process: TestProcess, _in_turn: None) -> Iterator[None]:
    """The first fixture of a test, so that all others have tidied up when it looks."""
    with _process.checked(kills=request.path.parent.name in ("launchers", "cluster")):
        yield


@pytest.fixture(scope="session")
def trained(request: pytest.FixtureRequest, corpus: Path, shared_folder: Path) -> Trained:
    """What the trainings of the collected modules left (trainings.py)."""
    modules = {item.path for item in request.session.items}
    slow = {item.path for item in request.session.items if item.get_closest_marker("slow") is not None}
    named = [named_by(item) for item in request.session.items if isinstance(item, pytest.Function)]
    return Trained(corpus, shared_folder / "trained", modules, slow, named, request.config.getoption("--soak"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests that start programs: `-m "not launches"`; and those of launchers and of a cluster, all of which are slow."""
    if starts_programs(item):
        item.add_marker("launches")
    if item.path.parent.name in ("launchers", "cluster"):
        item.add_marker("slow")


LONG = (
    "cluster/test_tutorial",
    "cluster/test_elastic",
    "returnn/test_networks",
    "returnn/",
    "ranks/test_networks",
    "ranks/test_slow_ranks",
    "cluster/",
    "test_benchmarks",
    "test_wheel",
    "plugins/init/",
    "ranks/test_groups",
    "doctor/",
)
"""What takes more than a minute or two in a file or, where tests of a file go to several workers, in a test."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which tests run one after the other in the same worker: those of a file, which share fixtures, and of all files those that
    wait for the same trainings: a group for each framework. These largest groups come first in their workers, and those of
    TensorFlow first in the group; then the LONG ones, so that no worker ends with one of them. Files whose trainings
    are launched apart, others on several ranks, and those on a cluster, of which each worker has its own, go wherever there is
    time.
    """
    from xdist.scheduler import LoadScopeScheduling

    @cache
    def sharing(file: str) -> set[str]:
        """The functions of a file that ask for the fixture `trained`, or for another one that does."""
        found, tree = {"trained", "results"}, ast.parse(text_of(file))  # `results`: of tests/ranks/conftest.py
        functions = {one.name: {each.arg for each in one.args.args} for one in tree.body if isinstance(one, ast.FunctionDef)}
        while more := {name for name, arguments in functions.items() if arguments & found} - found:
            found |= more
        return found

    def shares_trainings(nodeid: str) -> bool:
        file, _, test = nodeid.partition("::")
        name = Path(file).name
        if not name.startswith("test_"):  # a doctest
            return False
        return name.startswith("test_tensorflow") or test.partition("[")[0] in sharing(file)

    @cache
    def text_of(file: str) -> str:
        return (config.rootpath / file).read_text(encoding="utf-8")

    def has_own_launch(file: str) -> bool:
        return "apart=True" in text_of(file)

    @cache
    def starts_ranks(file: str) -> bool:
        return re.search(r"ranks=|, 2\)|torchrun\(|mpirun", text_of(file)) is not None

    def waits(group: str) -> int:
        """First come the large groups, then the long ones; then what waits for processes, which leaves time for others; then the
        rest.
        """
        long = [number for number, name in enumerate(LONG) if group.startswith(f"tests/{name}")]
        return -1 if group.startswith("trainings") else min(long, default=len(LONG) + (not starts_ranks(group.split("::")[0])))

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            if shares_trainings(nodeid) and not has_own_launch(file):
                return "trainings of TensorFlow" if "tensorflow" in nodeid else "trainings"
            is_free = Path(file).parent.name in ("ranks", "launchers", "cluster") and not has_own_launch(file)
            return nodeid if is_free else file

        def _assign_work_unit(self, node: Any) -> None:
            self.workqueue.move_to_end(min(self.workqueue, key=waits), last=False)
            super()._assign_work_unit(node)

    return Groups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that prove again what others prove are for --soak. RETURNN, which some tests call, switches TensorFlow to the
    behaviour of its version 1 for the rest of the process: tests that need version 2 come first. Those that run alone come
    before them, as long as no other worker has begun something long that they would have to wait for.
    """
    if not config.getoption("--soak"):
        repeated = [item for item in items if item.get_closest_marker("again") is not None]
        config.hook.pytest_deselected(items=repeated)
        items[:] = [item for item in items if item not in repeated]
    items.sort(key=lambda item: (item.get_closest_marker("quiet") is None, not item.path.name.startswith("test_tensorflow")))


STARTERS = {finish, launch, torchrun, hvdtrain, subprocess.run, subprocess.Popen, Terminal, Trained.__call__}


def starts_programs(item: pytest.Item) -> bool:
    """Whether a test, a fixture that it uses, or a function of their modules that they call starts a program."""
    if not isinstance(item, pytest.Function):
        return False
    definitions = item._fixtureinfo.name2fixturedefs.values()
    waiting: list[Any] = [item.function, *(one.func for several in definitions for one in several)]
    seen: set[Any] = set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if function in STARTERS or getattr(function, "__name__", "") == "trained":
            return True
        if function in seen or not inspect.isfunction(function):
            continue
        seen.add(function)
        for name in names_in(function.__code__):
            used = function.__globals__.get(name)
            if used is subprocess and {"run", "Popen"} & names_in(function.__code__):
                return True
            if callable(used) and (used in STARTERS or getattr(used, "__module__", None) == function.__module__):
                waiting.append(used)
    return False
