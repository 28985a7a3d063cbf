"""The program within the tests' own process, which has imported PyTorch already: a run takes no more than what it computes."""

import logging
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from inspect import getattr_static
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from launching import ROOT, Finished, clean_environment, faults

import hvdtrain.cli
from hvdtrain.errors import ConfigError, Problem


def run_inside(arguments: Sequence[object], folder: Path = ROOT) -> Finished:
    """What `python -m hvdtrain ARGUMENTS` prints and returns in a folder, without starting a process.

    For one rank whose process, its signals and its environment are not what is tested.
    """
    out, err = StringIO(), StringIO()
    started = time.monotonic()
    with nothing_changes(folder), raised_errors() as errors, redirect_stdout(out), redirect_stderr(err):
        status = hvdtrain.cli.main([str(argument) for argument in arguments])
    seconds = time.monotonic() - started
    problems = dict.fromkeys(problem for error in errors if str(error) in err.getvalue() for problem in error.problems)
    return Finished(status, out.getvalue(), err.getvalue(), seconds, tuple(faults(problems)))


@contextmanager
def raised_errors() -> Iterator[list[ConfigError]]:
    """The ConfigErrors that are made inside."""
    made: list[ConfigError] = []
    original = ConfigError.__init__

    def noted(error: ConfigError, problems: Sequence[Problem]) -> None:
        original(error, problems)
        made.append(error)

    with patch.object(ConfigError, "__init__", noted):
        yield made


@contextmanager
def nothing_changes(folder: Path = ROOT) -> Iterator[None]:
    """What a run may change of a process is afterwards as before: generators, threads, modules, the environment, the log."""
    import numpy
    import torch

    environment, before, path = dict(os.environ), os.getcwd(), list(sys.path)
    modules = dict(sys.modules)
    generators = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    threads = torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    log = logging.getLogger("hvdtrain")
    logs = list(log.handlers), log.level, log.propagate
    processes = set(multiprocessing.active_children())
    os.environ.clear()
    os.environ.update(clean_environment(environment))
    os.chdir(folder)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(before)
        sys.path[:] = path
        for name in [name for name, module in [*sys.modules.items()] if name not in modules and belongs_to_a_config(module)]:
            del sys.modules[name]
        torch.set_rng_state(generators[0])
        numpy.random.set_state(generators[1])
        random.setstate(generators[2])
        for process in set(multiprocessing.active_children()) - processes:  # an error would end the program, and these with it
            process.kill()
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
        for handler in set(log.handlers) - set(logs[0]):
            log.removeHandler(handler)
            handler.close()
        for handler in logs[0]:
            log.addHandler(handler)
        log.setLevel(logs[1])
        log.propagate = logs[2]
        assert handlers == {number: signal.getsignal(number) for number in handlers}  # the program itself puts them back


def belongs_to_a_config(module: object) -> bool:
    """Whether a module is one that a config imported from its own folder: another one's may have the same name."""
    file = getattr_static(module, "__file__", None)  # asked in the usual way, a lazy module is imported
    return file is not None and not any(Path(file).is_relative_to(place) for place in (sys.prefix, sys.base_prefix, ROOT))
