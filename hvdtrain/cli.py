"""The command line: `python -m hvdtrain config.py ++key value` trains; `python -m hvdtrain NAME ...` is another command."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.comm import this_process
from hvdtrain.comm.child import end_with
from hvdtrain.comm.launchers import SECONDS_FOR_THE_CAUSE, Launcher, SingleProcess, launchers
from hvdtrain.config.absent import import_part
from hvdtrain.config.check import did_you_mean
from hvdtrain.config.command_line import parse_command_line, without_local_rank
from hvdtrain.config.large_imports import LargeImports
from hvdtrain.config.plugins import Registry
from hvdtrain.errors import BY_CTRL_C, ConfigError, HvdtrainError, LaunchError, Outcome, failure_text
from hvdtrain.runtime.interrupt import Stopped
from hvdtrain.version import __version__

if TYPE_CHECKING:
    from hvdtrain.settings import Settings

COMMANDS: Registry[tuple[str, str]] = Registry("commands", {"help": ("explain a key, a topic or a command", "hvdtrain.help")})
"""By name: a line of help, and the module whose `main(arguments)` runs the command and returns the exit status, and whose
`parser()`, if it has one, returns the parser of its options."""

ASKS_TO_COMPLETE = "_ARGCOMPLETE"
"""The variable that a shell sets to ask for completions, which the command of that name answers."""

USAGE = """\
usage: python -m hvdtrain CONFIG [CONFIG ...] [++KEY VALUE ...]
       python -m hvdtrain COMMAND [ARGUMENT ...]
       mpirun -np N --bind-to none python -m hvdtrain CONFIG ++use_horovod 1 [++KEY VALUE ...]
       torchrun --nproc_per_node N -m hvdtrain CONFIG ++torch_distributed {} [++KEY VALUE ...]
       python -m hvdtrain CONFIG ++ngpu N [++KEY VALUE ...]

Train as the config says, from the last checkpoint on, or do another task (++task eval, forward, search, cleanup_old_models).
CONFIG is a Python file (every name it defines is a key or the author's own) or a JSON file; of several, later ones win.
++KEY VALUE, or ++KEY=VALUE, wins over all; ++train.seq_ordering random reaches into a dict. Values are Python literals, true,
false, or text.

options:
  -h, --help       this text
  --dry-run        build everything, run some steps, write nothing; estimate an epoch's time and memory (task dry_run)
  --find-batch-size
                   try larger and smaller batches, write nothing; tell which batch_size fits into memory (task find_batch_size)
  --summary        the model layer by layer, with parameters and the shapes that one batch has behind each layer (task summary)
  --find-learning-rate
                   train for some updates with a rate that grows, draw the losses, and suggest a rate (task find_learning_rate)
  --overfit-batches N
                   train on the first N batches again and again, which a sound model learns by heart (key overfit_batches)
  --print-config   every key in effect and where its value comes from; nothing is trained
  --changed        with --print-config: only the keys that differ from their defaults
  --color WHEN     colors of warnings and of the best epoch: auto (on a terminal), always or never (key log_color)
  --version        the version

commands (python -m hvdtrain COMMAND --help; write ./NAME for a config with such a name):
"""


SECONDS_FOR_RANK_0 = 5.0
"""How long the other ranks wait for rank 0 to print a mistake in the config. Most launchers end them sooner."""

INTERRUPTED = "interrupted; the same command continues after the last checkpoint"


def usage() -> str:
    """The options and the commands."""
    return USAGE + "".join(f"  {name:15}  {help}\n" for name, (help, _) in COMMANDS.items())


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return its exit status: 0, 1 for a crash, 2 for an error that the user can fix, 75 if training was stopped
    and should be restarted, 130 after Ctrl-C (docs/resuming.md).
    """
    _open_streams()
    try:
        status = run_command(arguments)
        sys.stdout.flush()
        if arguments is None:
            _name_threads_later()
        return status
    except BrokenPipeError:  # as in `--help | head`: nothing reads standard output any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at the end
        return 1
    except ConfigError as error:  # of a plug-in
        return _fail_before_connecting(error.on_all_ranks())
    except KeyboardInterrupt:  # while a config is read, which may import a framework
        if this_process.place().rank == 0:
            print("interrupted", file=sys.stderr, flush=True)
        return BY_CTRL_C


SECONDS_FOR_THREADS = 3.0
"""After its end, how long Python waits for the threads of the config before they are named."""


def _name_threads_later() -> None:
    """Name the threads of the config for which Python waits when the program has ended, which may be for ever."""

    def name() -> None:
        time.sleep(SECONDS_FOR_THREADS)
        waited = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
        if waited:
            print(
                f"hvdtrain: done, and waits for threads that the config's code has started: {', '.join(waited)} "
                "(threading.Thread(..., daemon=True) ends with the program)",
                file=sys.stderr,
                flush=True,
            )

    threading.Thread(target=name, name="name threads", daemon=True).start()


def _open_streams() -> None:
    """Make standard output and standard error take every line: where they are closed (`>&-`), lines go nowhere, and letters that
    their encoding lacks come as escapes. Python flushes both at its end, also a config's objects that cannot do that."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None or getattr(stream, "closed", False):
            opened = os.open(os.devnull, os.O_WRONLY)
            if opened != number:  # otherwise another file would get this number, and what is printed
                os.dup2(opened, number)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        elif not hasattr(stream, "flush"):
            with suppress(AttributeError):  # its class has slots
                stream.flush = lambda: None


def run_command(arguments: list[str] | None) -> int:
    """As `main`. Raises: KeyboardInterrupt."""
    if ASKS_TO_COMPLETE in this_process.environment() and "completion" in COMMANDS:
        arguments = ["completion"]
    LargeImports.install()
    arguments = sys.argv[1:] if arguments is None else arguments
    words = without_local_rank(arguments)
    if words[:1] == ["help"] and (len(words) == 1 or words[1] in COMMANDS):
        words = [*words[1:2], "--help"]
    if words and words[0] in COMMANDS:
        _, module = COMMANDS[words[0]]
        status: int = import_part(module).main(words[1:])
        return status
    if not words:
        print(usage())
        return 2
    if {"-h", "--help"} & set(words):
        from hvdtrain.help import first_page, show

        show(first_page(usage()))
        return 0
    if "--version" in arguments:
        print(f"hvdtrain {__version__}")
        return 0
    instead = next((text for tasks, text in INSTEAD.items() if words[0].replace("_", "-") in tasks), None)
    hint = f" (write {instead.replace('NAME', words[0])})" if instead is not None else did_you_mean(words[0], COMMANDS)
    if hint and not Path(words[0]).exists():
        mistake = LaunchError(f"{words[0]}: expected a command or a config file, got neither{hint}")
        return _fail_before_connecting(mistake.on_all_ranks())
    return run_config(arguments)


def run_config(arguments: list[str]) -> int:
    """Train, or do another task, as the config says; return the exit status."""
    # Imported here, so that build-horovod runs without numpy.
    from hvdtrain.settings import read_settings, with_datasets
    from hvdtrain.start_up.effective import print_config

    launcher = this_process.launcher()
    status = launcher.on_start()
    if status is not None:
        return status
    folder = os.getcwd()
    try:
        paths, overrides = parse_command_line(without_options(arguments))
        for option, task in TASK_OPTIONS.items():
            if option in arguments:
                overrides["task"] = task
        try:
            settings = read_settings(paths, overrides)
        finally:
            _open_streams()  # the config may have replaced them
        if "--print-config" in arguments:
            if launcher.place.rank == 0:
                print(print_config(settings, only_changed="--changed" in arguments))
            return 0
        for kind in launchers().values():
            status = kind.start(settings, arguments, folder)
            if status is not None:
                return status
        if launcher.is_restart and (problems := settings.start.restart_problems()):
            raise ConfigError(problems)
        settings = with_datasets(settings)
    except LaunchError as error:
        return _fail_before_connecting(error)
    except ConfigError as error:
        from hvdtrain.help import pointer

        return _fail_before_connecting(error.on_all_ranks(), pointer(error.problems))
    return exit_status(lambda: run_task(settings))


TASK_OPTIONS = {
    "--dry-run": "dry_run",
    "--find-batch-size": "find_batch_size",
    "--summary": "summary",
    "--find-learning-rate": "find_learning_rate",
}
"""Options that stand for a task."""


VALUE_OPTIONS = {"--overfit-batches": "++overfit_batches", "--color": "++log_color"}
"""Options that stand for a key."""


INSTEAD = {
    ("train", "run"): "python -m hvdtrain CONFIG",
    ("dry-run", "find-batch-size", "summary", "find-learning-rate", "print-config"): "python -m hvdtrain CONFIG --NAME",
    ("eval", "forward", "search", "cleanup-old-models"): "python -m hvdtrain CONFIG ++task NAME",
    ("version",): "python -m hvdtrain --version",
    ("predict",): "python -m hvdtrain CONFIG --dry-run ++predict_ranks 2,8",
}
"""What to write in place of words that one might take for commands."""


def without_options(arguments: list[str]) -> list[str]:
    """The arguments without the options that take no value; an option that takes one is replaced by an override.

    >>> without_options(["--dry-run", "--overfit-batches", "1", "config.py"])
    ['++overfit_batches', '1', 'config.py']
    """
    words = [word for word in arguments if word not in (*TASK_OPTIONS, "--print-config", "--changed")]
    return [re.sub("^(--[a-z-]+)(?==|$)", lambda match: VALUE_OPTIONS.get(match[1], match[1]), word) for word in words]


def exit_status(work: Callable[[], object], interrupted: str = INTERRUPTED) -> int:
    """Do a rank's work; if it fails, print why. Return the exit status, or exit at once.

    Args:
        interrupted: the message after Ctrl-C.
    """
    launcher = this_process.launcher()
    end_with(launcher.parent)
    try:
        work()
        launcher.on_success()
        return 0
    except LaunchError as error:
        return _fail_before_connecting(error)
    except Stopped as stopped:
        if not stopped.on_every_rank and launcher.place.rank:
            time.sleep(SECONDS_FOR_THE_CAUSE)  # of all ranks that got the signal, one is to print it
        launcher.on_stop(stopped.outcome, str(stopped))
        return stopped.status if stopped.is_printed else _end(str(stopped), stopped.outcome)
    except HvdtrainError as error:
        return _fail(str(error), error.outcome)
    except KeyboardInterrupt:
        return _fail(interrupted, Outcome(BY_CTRL_C, "all ranks"))
    except BaseException as error:
        return _fail(failure_text(error), Outcome(1))


def run_task(settings: Settings) -> Any:
    """Run the config's `task`, and return its result. Raises: HvdtrainError."""
    from hvdtrain.training.run_keys import TASKS

    if settings.function is not None:
        return settings.function()
    return TASKS[settings.run.task](settings)  # imported now, so that mistakes in the config are reported at once


def _fail_before_connecting(error: HvdtrainError, more: str = "") -> int:
    """Print an error that every rank finds by itself, and return the exit status or exit at once.

    The other ranks give rank 0 time to print it: a launcher ends all ranks when the first one exits, and rank 0 may be late. A
    rank that still runs after that time prints the error, too: there may be no rank 0, only variables of an earlier launcher.

    Args:
        more: text after the error.
    """
    outcome = error.outcome
    launcher = _launcher()
    if error.on_every_rank and launcher.place.rank != 0:
        time.sleep(SECONDS_FOR_RANK_0)
        outcome = replace(outcome, scope="this rank")
        more += f"\n  (this is rank {launcher.place.rank} by {launcher.evidence}: unset these, if no launcher has started it)"
    return _fail(f"{error}{more}", outcome)


def _launcher() -> Launcher:
    """The launcher, as far as it is known: a plug-in with launchers may be what cannot be imported."""
    try:
        return this_process.launcher()
    except ConfigError:
        return SingleProcess.detect({})


def _fail(message: str, outcome: Outcome) -> int:
    """Report to the launcher that this rank fails, and print why; return the exit status or exit at once."""
    return _end(message + _launcher().on_failure(outcome, message), outcome)


def _end(message: str, outcome: Outcome) -> int:
    """Print why a rank ends, and return the exit status or exit at once.

    If all ranks end together, rank 0 prints the message and all exit regularly. A rank that fails alone exits at once, without
    closing its connections: its launcher then ends the others, which may be blocked on it in a collective.
    """
    launcher = _launcher()
    rank, size = launcher.place.rank, launcher.place.size
    status = launcher.peer_status if outcome.scope == "a peer" else outcome.status
    if outcome.scope == "all ranks":
        if rank == 0:
            print(message, file=sys.stderr, flush=True)
        return status
    prefix = f"rank {rank} of {size}: " if size > 1 else ""
    print(f"{prefix}{message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if size > 1:
        os._exit(status)
    return status
