"""hvdtrain for other programs, such as notebooks, tests, sweeps and job managers: `hvdtrain.train(...)` and related functions.

A job runs in the program's process, or on ranks that are started for it (spawn.py). Any state of the program's process that
a job changes, such as logging, seeds and threads, is restored when the function returns.
"""

from __future__ import annotations

import json
import os
import random
import sys
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock, current_thread, main_thread
from typing import Any

import numpy

from hvdtrain.cli import run_task
from hvdtrain.comm import this_process
from hvdtrain.comm.for_configs import use_communicator
from hvdtrain.comm.launchers import Place
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.config.overrides import CALL, OVERRIDING
from hvdtrain.config.source import Config
from hvdtrain.errors import CheckpointError, ConfigError, LaunchError, problem
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.plugins.local_ranks.start import places, restart_rule
from hvdtrain.plugins.programs.restored import ToProgram, programs_log, separate_imports
from hvdtrain.plugins.programs.result import Best as Best
from hvdtrain.plugins.programs.result import Result as Result
from hvdtrain.plugins.programs.spawn import NotImportable, call_on_ranks, pack_with_code
from hvdtrain.run import Trained
from hvdtrain.runtime.process import Process
from hvdtrain.runtime.records import prefix_of, records_of
from hvdtrain.settings import Settings, read_settings, with_datasets
from hvdtrain.start_up.job import open_session
from hvdtrain.training.average import Average as Average

ConfigLike = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, Any]
"""A config: a file, several files, of which later ones win, or a dict of keys."""

CheckpointLike = str | os.PathLike[str] | int
"""A model: its file, an epoch, or "best"."""

_BUSY = Lock()


def train(config: ConfigLike | None = None, *, ranks: int | None = None, handle_signals: bool = False, **keys: Any) -> Result:
    """Train as `python -m hvdtrain CONFIG ++KEY VALUE` does, from the newest checkpoint on.

    Args:
        config: a config file, a list of files, of which later ones win, or a dict of keys; None: only `keys`.
        ranks: start this many processes on this host, which connect by torch.distributed; 1: train in this process; None: as the
            key `ngpu` says. In a process that mpirun, srun or torchrun has started, this process is a rank.
        handle_signals: SIGTERM, SIGUSR1 and Ctrl-C stop the training with a checkpoint, and `Stopped` (runtime/interrupt.py) is
            raised. Otherwise signals are the program's, and Ctrl-C is a KeyboardInterrupt, which saves nothing.
        keys: keys of the config, which win. `**{"train.seq_ordering": "random"}` sets an entry of a dict.

    Raises:
        HvdtrainError: a mistake in the config (`ConfigError`, with all problems), the data or a checkpoint.
        optuna.TrialPruned: a callback or track_epoch has raised it; after the epoch, its checkpoint and its reports.
        Exception: raised by a function of the config. If that ran in a separate process, the cause is the traceback there.
    """
    job = _Job(config, keys | {"task": "train"}, ranks, handle_signals)
    trained = job.run()
    folder = trained["checkpoint"].parent
    best = _best(folder, trained["best"])
    return Result(trained["history"], best, trained["checkpoint"], trained["num_epochs"], trained["averages"], trained["model"])


def evaluate(
    config: ConfigLike | None = None, *, checkpoint: CheckpointLike | None = None, ranks: int | None = None, **keys: Any
) -> dict[str, float]:
    """Evaluate a trained model on dev, eval and eval_datasets (the task `eval`); return the scores by name: 'dev_loss_ce'.

    Args:
        checkpoint: the model's file, an epoch of the key `model`, or "best"; None: the last epoch.
        config, ranks, keys: as of `train`.

    Raises:
        HvdtrainError: a mistake in the config, the data or a checkpoint.
    """
    scores = _Job(config, keys | {"task": "eval"} | _keys_of(checkpoint), ranks).run()
    return dict(scores)


def forward(
    config: ConfigLike | None = None, *, checkpoint: CheckpointLike | None = None, ranks: int | None = None, **keys: Any
) -> list[tuple[str, dict[str, Any]]]:
    """Run the config's forward_step over forward_data (the task `forward`).

    Args:
        checkpoint: the model's file, an epoch of the key `model`, or "best"; None: the last epoch.
        config, ranks, keys: as of `train`.

    Returns:
        For each sequence, in the dataset's order, its tag and what forward_step marks, by name, as numpy arrays of shape
        (frames, ...). Empty if `output_file` or `forward_callback` takes the outputs, and on ranks other than 0.

    Raises:
        HvdtrainError: a mistake in the config, the data or a checkpoint.
    """
    outputs = _Job(config, keys | {"task": "forward"} | _keys_of(checkpoint), ranks).run()
    return list(outputs)


def load_model(checkpoint: str | os.PathLike[str], config: ConfigLike | None = None, **keys: Any) -> Any:
    """Build the config's model in this process and load its weights; no data is opened.

    Args:
        checkpoint: the model's file, such as `result.best.checkpoint` or "exp/a/model.003.pt".
        config: as of `train`; None, and no keys: as the last training in the checkpoint's folder was started (starts.jsonl).

    Returns:
        What get_model returns, with the weights, ready to be evaluated.

    Raises:
        CheckpointError: there is no such file, it belongs to another model, or its config is unknown.
        ConfigError: a mistake in the config.
    """
    path = Path(checkpoint)
    overrides: dict[str, Any] = dict(keys)
    if config is None and not keys:
        if path.is_dir():
            raise CheckpointError(f"checkpoint: expected a model's file, such as {path / 'model.001.pt'}, got the folder {path}")
        config, overrides = _read_start(records_of(prefix_of(path)))
    return _load_alone(_configs(config), overrides | {"task": "train"}, path)


@dataclass(frozen=True)
class _Job:
    """A task with its config, which runs in this process or on ranks that are started for it."""

    config: ConfigLike | None
    keys: Mapping[str, Any]
    ranks: int | None = None
    handles_signals: bool = False

    def run(self) -> Any:
        """What the task returns. Raises: HvdtrainError."""
        configs = _configs(self.config)
        if self.ranks is not None and (not isinstance(self.ranks, int) or isinstance(self.ranks, bool) or self.ranks < 1):
            raise ConfigError.of("out-of-range", f"ranks: expected a positive number, got {self.ranks!r} in the call")
        thread = current_thread()
        if self.handles_signals and thread is not main_thread():  # Python sets signal handlers only there
            raise LaunchError(f"handle_signals: expected a call in the main thread, got one in the thread {thread.name!r}")
        with _exclusive_job(), _restored_process(configs):
            keys = self.keys if self.ranks in (None, 1) else {**self.keys, "ngpu": self.ranks}
            settings = read_settings(configs, keys, CALL)
            wanted = _ranks_to_start(settings, self.ranks)
            if not wanted:
                process = Process(is_own=False, handles_signals=self.handles_signals, log_handler=ToProgram)
                return _run_in_process(replace(settings, process=process))
            self._check_importable(configs)
            arguments = {"configs": configs, "keys": {**self.keys, "ngpu": wanted[0].size}}
            returned = call_on_ranks(wanted, f"{__name__}:_on_rank", arguments, restart_rule(settings), self.handles_signals)
            if settings.run.task == "train":
                returned["model"] = partial(_load_alone, configs, self.keys, returned["checkpoint"])
            return returned

    def _check_importable(self, configs: Sequence[Config]) -> None:
        """Raises: ConfigError, if a value cannot be sent to other processes."""
        problems = []
        for values in (*(config for config in configs if not isinstance(config, Path)), self.keys):
            for name, value in values.items():
                try:
                    pack_with_code(value)
                except NotImportable as error:
                    problems += problem(
                        "cannot-import",
                        f"{name}: expected what each rank can import, got {error} in the call (put it into a module or a config "
                        "file; with ranks=1 it may be anything)",
                    )
        if problems:
            raise ConfigError(problems)


def _on_rank(configs: Sequence[Config], keys: Mapping[str, Any]) -> Any:
    """The function that each started rank runs; returns a picklable value."""
    settings = replace(read_settings(configs, keys, CALL), process=Process(log_handler=ToProgram))
    result = _run_in_process(settings)
    return {name: value for name, value in result.items() if name != "model"} if settings.run.task == "train" else result


def _run_in_process(settings: Settings) -> Any:
    """Run the settings' task, and return what the program gets of its result. Raises: HvdtrainError."""
    settings = with_datasets(settings)
    collector = _Collector()
    if settings.run.task == "forward":
        settings = _collecting(settings, collector)
    with FRAMEWORKS[settings.run.backend].preserve_state():
        result = run_task(settings)
        if settings.run.task == "forward":
            return collector.outputs
        return _training_result(settings, result) if settings.run.task == "train" else result


def _collecting(settings: Settings, collector: _Collector) -> Settings:
    """The settings with the collector as forward_callback, unless the outputs go elsewhere."""
    from hvdtrain.plugins.forward import ForwardKeys

    keys = settings.of(ForwardKeys)
    if keys.output_file is not None or keys.forward_callback is not None:
        return settings
    others = tuple(section for section in settings.of_plugins if section is not keys)
    return replace(settings, of_plugins=(*others, replace(keys, forward_callback=collector)))


def _training_result(settings: Settings, trained: Trained) -> dict[str, Any]:
    if trained.pruned is not None:
        raise trained.pruned
    if trained.learner.state.evaluates_others() and trained.checkpoint.exists():  # it holds those that were evaluated
        trained.learner.state.load(trained.checkpoint, None)
    return {
        "history": trained.history,
        "best": trained.best,
        "checkpoint": trained.checkpoint.absolute(),
        "num_epochs": trained.num_epochs,
        "averages": trained.averages,
        "model": partial(_set_to_evaluate, trained.learner.model),
    }


class _Collector:
    """A forward_callback that keeps all outputs."""

    def __init__(self) -> None:
        self.outputs: list[tuple[str, dict[str, Any]]] = []

    def init(self, *, model: Any) -> None: ...

    def process_seq(self, *, seq_tag: str, outputs: Mapping[str, Any]) -> None:
        self.outputs.append((seq_tag, {name: output.raw_tensor for name, output in outputs.items()}))

    def finish(self) -> None: ...


def _set_to_evaluate(model: Any) -> Any:
    """Set a PyTorch model to evaluate. Models of other frameworks take the mode as an argument of each call."""
    return getattr(model, "eval", lambda: model)()


def _load_alone(configs: Sequence[Config], keys: Mapping[str, Any], checkpoint: Path) -> Any:
    with _exclusive_job(), _restored_process(configs):
        return _load(read_settings(configs, keys, CALL), checkpoint)


def _load(settings: Settings, checkpoint: Path) -> Any:
    settings = replace(
        settings,
        process=Process(is_own=False, handles_signals=False, log_handler=ToProgram),
        start=replace(settings.start, load=str(checkpoint), load_epoch=None),
        log=replace(settings.log, log=None, log_verbosity=settings.log.targets["stdout"]),
        reduce=replace(settings.reduce, use_horovod=False, horovod_timeline=None),
        torch_distributed=None,
    ).with_keys(torch_compile=False)
    place = this_process.place()
    comm = SingleCommunicator(place.local_rank, place.local_size)  # also in a process that mpirun started
    preserved = FRAMEWORKS[settings.run.backend].preserve_state()
    with preserved, use_communicator(comm), open_session(settings, "load", comm) as session:
        return _set_to_evaluate(session.learner.model)


def _best(folder: Path, best: Mapping[str, Any] | None) -> Best | None:
    if best is None:
        return None
    file = None if best["file"] is None else folder / best["file"]
    scores = {name: float(score) for name, score in best["scores"].items()}
    return Best(best["epoch"], best["measure"], float(best["score"]), scores, file)


def _configs(config: ConfigLike | None) -> list[Config]:
    """The configs as a list. Raises: ConfigError."""
    if config is None or isinstance(config, Mapping):
        return [] if config is None else [config]
    files = config if isinstance(config, list | tuple) else [config]
    for file in files:
        if not isinstance(file, str | os.PathLike):
            raise ConfigError.of(
                "wrong-type", f"config: expected a config file, several files or a dict of keys, got a {type(file).__name__}"
            )
    return list(map(Path, files))


def _keys_of(checkpoint: CheckpointLike | None) -> dict[str, Any]:
    if checkpoint is None:
        return {}
    if isinstance(checkpoint, int) or checkpoint == "best":
        return {"load": None, "load_epoch": checkpoint}
    return {"load": os.fspath(checkpoint), "load_epoch": None}


def _ranks_to_start(settings: Settings, ranks: int | None) -> list[Place]:
    """The ranks to start; empty: this process runs the job. Raises: LaunchError."""
    place = this_process.place()
    if ranks is None:
        return places(settings.launch, place)
    if ranks == 1:
        return []
    if place.launcher is not None:
        raise LaunchError(f"ranks: expected none for a process that {place.launcher} has started as a rank, got {ranks}")
    return [Place("hvdtrain", rank, ranks, rank, ranks) for rank in range(ranks)]


@contextmanager
def _exclusive_job() -> Iterator[None]:
    """Exclude concurrent jobs, which would share seeds, threads and the log. Raises: LaunchError, if another one is running."""
    if not _BUSY.acquire(blocking=False):
        raise LaunchError(
            "hvdtrain: expected one job at a time in a process, got another one that is running (concurrent jobs need separate "
            "processes, such as those of concurrent.futures.ProcessPoolExecutor with the method spawn)"
        )
    try:
        yield
    finally:
        _BUSY.release()


@contextmanager
def _restored_process(configs: Sequence[Config]) -> Iterator[None]:
    """Restore at the end the state of the process that a job, or reading its config, changes."""
    generators = random.getstate(), numpy.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(this_process.preserved_environment())
        stack.enter_context(programs_log())
        stack.enter_context(separate_imports(config for config in configs if isinstance(config, Path)))
        for name, framework in FRAMEWORKS.items():
            if name in sys.modules:
                stack.enter_context(framework.preserve_state())
        try:
            yield
        finally:
            random.setstate(generators[0])
            numpy.random.set_state(generators[1])


def _read_start(folder: Path) -> tuple[list[Path], dict[str, Any]]:
    """The config files and the overrides of the last training in a folder. Raises: CheckpointError."""
    path = folder / "starts.jsonl"
    hint = "pass the config: load_model(checkpoint, config)"
    try:
        start = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        texts = dict(start["texts"])
        settings = dict(start["settings"])
        files = [Path(start["directory"], name) for name in texts]
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: expected what a training was started with, got: {why} ({hint})") from None
    for file, text in zip(files, texts.values(), strict=True):
        if not file.is_file() or file.read_text(encoding="utf-8-sig") != text:
            got = "another text" if file.is_file() else "no such file"
            raise CheckpointError(f"{file}: expected the config that the model was trained with, got {got} ({hint})")
    keys: dict[str, Any] = {}
    for name, (value, origin) in settings.items():
        if any(source in origin for source in (*OVERRIDING, "the dict of keys")):
            try:
                keys[name] = literal_eval(value)
            except (ValueError, SyntaxError):
                raise CheckpointError(
                    f"{path}: expected values that can be read back, got {name} = {value}, an object of the program ({hint})"
                ) from None
    return files, keys
