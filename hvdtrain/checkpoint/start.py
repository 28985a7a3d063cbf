"""Which model a job starts with: a new one, the newest checkpoint of the training, or another model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hvdtrain.checkpoint.files import Checkpoint
from hvdtrain.checkpoint.folder import ABANDONED, CheckpointFolder, folder_of
from hvdtrain.checkpoint.hooks import CheckpointHooks
from hvdtrain.checkpoint.keys import StartKeys
from hvdtrain.checkpoint.loader import Loader
from hvdtrain.checkpoint.progress import Progress, best_position
from hvdtrain.checkpoint.stored import read_progress as stored_progress
from hvdtrain.comm.base import Communicator, on_rank_zero
from hvdtrain.config.references import as_function
from hvdtrain.errors import CheckpointError, ConfigError, DamagedCheckpoint
from hvdtrain.learner.frameworks import FRAMEWORKS, NEW
from hvdtrain.runtime import log
from hvdtrain.runtime.records import records_of


@dataclass(frozen=True)
class StartingPoint:
    """What to load.

    Attributes:
        checkpoint: the checkpoint to continue from, with its optimizer and scores.
        model_file: otherwise, a file from which to load the model only.
        epoch: with model_file, the last epoch that counts as done; None: the epoch stored in the file.
        remark: a warning for the log.
        is_import: whether the model is that of `import_model_train_epoch1`.
    """

    checkpoint: Checkpoint | None = None
    model_file: Path | None = None
    epoch: int | None = None
    remark: str | None = None
    is_import: bool = False


def start_of_training(keys: StartKeys, folder: CheckpointFolder) -> StartingPoint:
    """What to load for a training. Raises: CheckpointError."""
    start = _start_of_training(keys, folder)
    used = "import_model_train_epoch1" if start.is_import else "load_epoch" if keys.load is None else "load"
    names = [name for name in ("load", "import_model_train_epoch1") if getattr(keys, name) is not None]
    if start.remark is None and (ignored := [name for name in names if start.model_file is None or name != used]):
        why = f"{used} is set" if start.checkpoint is None else "there is a checkpoint already"
        return replace(start, remark=f"{' and '.join(ignored)}: ignored, as {why}")
    return start


def _start_of_training(keys: StartKeys, folder: CheckpointFolder) -> StartingPoint:
    newest = folder.newest()
    if keys.start_epoch != "auto" and keys.start_epoch > 1:
        if keys.load is not None:
            return StartingPoint(model_file=model_file(keys, folder), epoch=keys.start_epoch - 1)
        if keys.load_epoch is not None and _position(keys.load_epoch, folder.prefix) != (keys.start_epoch - 1, None):
            raise CheckpointError(
                f"start_epoch, load_epoch: expected load_epoch = {keys.start_epoch - 1}, after which epoch {keys.start_epoch} "
                f"begins, got {keys.load_epoch} (to begin it with another model, set `load` to its file)"
            )
        return StartingPoint(_require_complete(folder.checkpoint_at(keys.start_epoch - 1), folder))
    if keys.load is None and keys.load_epoch is not None:
        if keys.start_epoch == 1:
            return StartingPoint(model_file=model_file(keys, folder), epoch=0)
        return StartingPoint(_require_complete(folder.checkpoint_at(*_position(keys.load_epoch, folder.prefix)), folder))
    if newest is not None and keys.start_epoch == "auto":
        return StartingPoint(newest)
    if newest is None and keys.start_epoch == "auto":
        _refuse_other_frameworks(folder)
        if keys.load is None or not folder.has_name(model_file(keys, folder)):
            _refuse_to_replace(folder)
    remark = None
    records = records_of(folder.prefix)
    if newest is None and records != folder.folder:
        remark = f"model: {folder.folder} has another model, too: scores.jsonl and the other records of this one are in {records}"
    if keys.import_model_train_epoch1 is not None and (keys.load is None or keys.start_epoch == "auto"):
        file = _file(keys.import_model_train_epoch1, folder, keys, "import_model_train_epoch1")
        return StartingPoint(model_file=file, epoch=0, remark=remark, is_import=True)
    if keys.load is not None:
        file = model_file(keys, folder)
        return StartingPoint(model_file=file, epoch=0 if keys.start_epoch == 1 else epoch_of_file(keys, folder), remark=remark)
    return StartingPoint(remark=remark)


def start_of_task(keys: StartKeys, folder: CheckpointFolder, is_filled: bool = False) -> StartingPoint:
    """What to load for a task other than training: a model, unless a plug-in fills it. Raises: CheckpointError."""
    if is_filled and not (keys.load or keys.load_epoch or keys.import_model_train_epoch1 or folder.finished_epochs()):
        return StartingPoint()
    return StartingPoint(model_file=model_file(keys, folder), epoch=epoch_of_file(keys, folder))


def position_of_model(
    start: StartingPoint, keys: StartKeys, folder: CheckpointFolder, read_progress: Callable[[Path], Mapping[str, Any]]
) -> tuple[int, int]:
    """The epoch and the number of its last step with which get_model is called, as in RETURNN: those of the model that will be
    loaded; epoch 0 for `import_model_train_epoch1`.

    Args:
        read_progress: returns the plain values in a model's file.
    """
    file = start.model_file if start.checkpoint is None else start.checkpoint.model_file
    if file is None:
        return NEW
    try:
        progress = Progress() if file.is_dir() else stored_progress(read_progress(file), file)
    except DamagedCheckpoint:  # loading it will say what is wrong, and what else there is, unless a checkpoint_reader can
        progress = Progress()
    epoch = progress.epoch if progress.current is None else progress.current.epoch
    return 0 if start.is_import else (epoch_of_file(keys, folder) or epoch or 1), max(0, progress.step - 1)


def _refuse_to_replace(folder: CheckpointFolder) -> None:
    """Raises: CheckpointError, if a trained model has lost its optimizer: training would begin anew, and replace the model."""
    if epochs := folder.finished_epochs():
        last = folder.checkpoint_at(epochs[-1])
        raise CheckpointError(
            f"model: expected {last.optimizer_file}, with which training continues after epoch {last.epoch}, got no such file "
            f"(++start_epoch {last.epoch + 1} ++load {last.model_file} continues with a new optimizer; ++start_epoch 1 begins "
            "anew and replaces the model)"
        )


def _refuse_other_frameworks(folder: CheckpointFolder) -> None:
    """Raises: CheckpointError, if another framework has trained a model of the same name, which would be trained anew."""
    for name, framework in FRAMEWORKS.items():
        newest = folder_of(framework, folder.prefix).newest() if framework.suffix != folder.suffix else None
        if newest is not None:
            backend = next(backend for backend, framework in FRAMEWORKS.items() if framework.suffix == folder.suffix)
            raise CheckpointError(
                f"model: expected files of backend {backend!r} such as {folder.new(1).model_file.name}, or none, got "
                f"{newest.optimizer_file} of backend {name!r} (give this training another `model`, or remove {folder.prefix}.*)"
            )


def model_file(keys: StartKeys, folder: CheckpointFolder) -> Path:
    """The model for other tasks than training: from `load` and `load_epoch`, or of the last finished epoch.

    Raises:
        CheckpointError: there is no such file.
    """
    if keys.load is not None:
        if keys.load_epoch is None:
            return _file(keys.load, folder, keys)
        epoch, step = _position(keys.load_epoch, Path(keys.load))
        name = f"{keys.load}.{epoch:03d}" + ("" if step is None else f".step-{step}")
        if epoch_of_file(keys, folder) is None:
            return _file(name, folder, keys)
        file = _file(keys.load, folder, keys)
        if match := next(filter(Path.is_file, _candidates(name, folder)), None):
            raise CheckpointError(
                f"load, load_epoch: expected one file, got {match} and {file}, which would count as epoch {epoch} (set load to "
                f"the whole path of one; {match} needs no load_epoch)"
            )
        return file
    if keys.load_epoch is not None:
        position = _position(keys.load_epoch, folder.prefix)
        if not folder.checkpoint_at(*position).model_file.exists():
            raise CheckpointError(
                f"load_epoch: expected an epoch that has a model, got {keys.load_epoch}: there is no "
                f"{folder.checkpoint_at(*position).model_file}"
            )
        return folder.checkpoint_at(*position).model_file
    last = max(folder.finished_epochs(), default=None)
    if last is None and keys.import_model_train_epoch1 is not None:
        return _file(keys.import_model_train_epoch1, folder, keys, "import_model_train_epoch1")
    if last is None:
        raise CheckpointError(
            f"load: expected a trained model, got no file such as {folder.checkpoint_at(1).model_file} (set load to a model file)"
        )
    return folder.checkpoint_at(last).model_file


def epoch_of_file(keys: StartKeys, folder: CheckpointFolder) -> int | None:
    """The epoch that `load` counts as if it is a file, by `load_epoch`, as in RETURNN; None: that in the file."""
    if (
        keys.load is None
        or not isinstance(keys.load_epoch, int)
        or not any(candidate.is_file() for candidate in _candidates(keys.load, folder))
    ):
        return None
    return keys.load_epoch


def _position(wanted: int | Literal["best"], prefix: Path) -> tuple[int, int | None]:
    """An epoch, and the step if its model is from within it."""
    return best_position(prefix) if wanted == "best" else (wanted, None)


def _require_complete(checkpoint: Checkpoint, folder: CheckpointFolder) -> Checkpoint:
    if folder.is_from_elsewhere(checkpoint):
        return checkpoint
    for file in (checkpoint.model_file, checkpoint.optimizer_file):
        if not file.exists():
            raise CheckpointError(
                f"start_epoch, load_epoch: expected a complete checkpoint of epoch {checkpoint.epoch}, got no {file} "
                "(to continue without the optimizer state, set start_epoch, and `load` to the model file)"
            )
    return checkpoint


def _candidates(name: str, folder: CheckpointFolder) -> list[Path]:
    has_suffix = name.endswith(tuple(f".{suffix}" for suffix in folder.model_suffixes))
    return [Path(name), *(Path(f"{name}.{suffix}") for suffix in folder.model_suffixes if not has_suffix)]


def _file(name: str, folder: CheckpointFolder, keys: StartKeys, key: str = "load") -> Path:
    candidates = _candidates(name, folder)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if keys.checkpoint_reader is not None and Path(name).is_dir():
        return Path(name)
    raise CheckpointError(f"{key}: expected a model file, got no {' or '.join(map(str, candidates))}")


def resume(
    comm: Communicator,
    loader: Loader,
    checkpoints: CheckpointFolder,
    start: StartingPoint,
    keys: StartKeys,
    checkpoint_hooks: Sequence[CheckpointHooks] = (),
) -> Progress:
    """Collective. Load what a training starts from, and make the model the same on all ranks.

    Args:
        start: what `start_of_training` found on rank 0.
        checkpoint_hooks: load more, and know the scores of the epochs that a model without scores was trained for elsewhere.

    Raises:
        CheckpointError: what was asked for is not there, or a rank cannot read it.
        DataError: what a plug-in reads is damaged.
    """
    if start.remark is not None:
        log.warning(start.remark)
    progress = Progress()
    if start.checkpoint is not None:
        progress = _load(comm, loader, checkpoints, start.checkpoint, keys.fresh_optimizer)
        optimizer_text = ", with a new optimizer" if keys.fresh_optimizer else ""
        progress.start = f"Loaded {start.checkpoint.model_file}: training continues {progress.describe()}{optimizer_text}."
    elif start.model_file is not None:
        reader = as_function(keys.checkpoint_reader, "checkpoint_reader")
        progress = loader.load_model(start.model_file, start.epoch, reader, with_optimizer=not keys.fresh_optimizer)
        progress.start = f"Loaded {start.model_file}: training continues {progress.describe()}."
    if comm.rank == 0 and (later := [epoch for epoch in checkpoints.finished_epochs() if epoch > progress.epoch]):
        log.warning(
            f"model: training begins with epoch {progress.epoch + 1}: its first checkpoint replaces its model, and renames "
            f"those of later epochs, up to {checkpoints.checkpoint_at(later[-1]).model_file}, to *{ABANDONED}"
        )
    if progress.epoch and not progress.history:
        records = on_rank_zero(comm, lambda: [hooks.history(progress.epoch) for hooks in checkpoint_hooks], name="history")
        progress.history = [record for of_hooks in records for record in of_hooks if record.epoch <= progress.epoch]
    for hooks in checkpoint_hooks:
        hooks.load(loader, is_training=True, is_fresh=start.checkpoint is None)
    if start.checkpoint is None:
        loader.broadcast()
    return progress


def _load(
    comm: Communicator, loader: Loader, checkpoints: CheckpointFolder, checkpoint: Checkpoint, fresh_optimizer: bool
) -> Progress:
    """Collective. Continue from a checkpoint; if it is damaged, the error says what else there is. Raises: CheckpointError."""
    try:
        return loader.load(checkpoint, fresh_optimizer)
    except DamagedCheckpoint as error:
        if not error.on_every_rank:
            raise
        advice = on_rank_zero(comm, lambda: _advice(loader, checkpoints, checkpoint), name="older_checkpoints")
        raise DamagedCheckpoint(f"{error} ({advice})").on_all_ranks() from None


def _advice(loader: Loader, checkpoints: CheckpointFolder, damaged: Checkpoint) -> str:
    """How to continue without a checkpoint."""
    away = f"move {damaged.start.name}.* to another folder"
    for older in checkpoints.older(damaged):
        if older.optimizer_file.exists() and loader.is_intact(older):
            return f"{older.model_file} is whole: {away}, and the same command continues {older.describe()}"
        if older.step is None and loader.is_intact(older, model_only=True):
            return (
                f"{older.model_file} is whole, but has no optimizer: ++start_epoch {older.epoch + 1} ++load {older.model_file} "
                f"continues after epoch {older.epoch} with a new one"
            )
    return f"no older checkpoint is whole: {away}, and the same command begins anew"


def call_hooks(hooks: Sequence[Any], model: Any) -> None:
    """Call the functions of `load_model_post_hooks` with a model of PyTorch. Raises: ConfigError."""

    def trained_ids() -> list[tuple[str, int]]:
        return [(name, id(values)) for name, values in model.named_parameters() if values.requires_grad]

    before = trained_ids()
    for number, hook in enumerate(hooks):
        function = as_function(hook, f"load_model_post_hooks[{number}]")
        if function is not None:
            function(model=model)
    after = trained_ids()
    if after != before:
        changed = sorted(name for name, _ in {*before} ^ {*after})
        raise ConfigError.of(
            "wrong-result",
            "load_model_post_hooks: expected functions that leave the trained parameters the same objects, got others: "
            f"{', '.join(dict.fromkeys(changed))} (the optimizer has them already: replace or freeze them in get_model)",
        )


def load_trained(loader: Loader, start: StartingPoint, keys: StartKeys, checkpoint_hooks: Sequence[CheckpointHooks]) -> Progress:
    """Collective. Load a trained model without its optimizer; one that a plug-in fills needs no checkpoint.

    Args:
        start: what `start_of_task` found on rank 0.

    Raises:
        CheckpointError: a rank cannot read the model.
    """
    progress = Progress()
    if start.model_file is not None:
        progress = loader.load_model(start.model_file, start.epoch, as_function(keys.checkpoint_reader, "checkpoint_reader"))
        log.info(f"Loaded {start.model_file}.")
    for hooks in checkpoint_hooks:
        hooks.load(loader, is_training=False, is_fresh=start.model_file is None)
    return progress
