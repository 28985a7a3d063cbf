"""Loads parameters of other models when a job opens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from hvdtrain.checkpoint.hooks import CheckpointHooks
from hvdtrain.checkpoint.loader import Loader
from hvdtrain.comm.base import together
from hvdtrain.errors import CheckpointError
from hvdtrain.learner.preload import PreloadFunction, PreloadRequest
from hvdtrain.plugins.preload.keys import Preload, PreloadFilesKeys, parse_preloads
from hvdtrain.runtime import log
from hvdtrain.settings import Settings


def preloading_of(settings: Settings) -> Preloading | None:
    """What loads the files of a config's `preload_from_files`."""
    preloads = parse_preloads(settings.of(PreloadFilesKeys).preload_from_files)
    return Preloading(preloads) if preloads else None


class Preloading(CheckpointHooks):
    """Loads parameters from files, in this order."""

    def __init__(self, preloads: Sequence[Preload]) -> None:
        self._preloads = preloads

    def fills_model(self) -> bool:
        return any(preload.is_due(training=False, fresh=True) for preload in self._preloads)

    def constants(self) -> Callable[[PreloadFunction], list[str]] | None:
        """What loads the entries whose parameters are neither trained nor saved, with the entries for missing ones."""
        constant = [preload for preload in self._preloads if preload.is_constant]
        for preload in constant:
            log.info(f"preload_from_files.{preload.name}: the parameters in {preload.filename} are neither trained nor saved.")
        missing = [preload for preload in self._preloads if preload.filename is None and not preload.is_constant]
        return partial(load_preloads, [*constant, *missing]) if constant else None

    def load(self, loader: Loader, *, is_training: bool, is_fresh: bool) -> None:
        due = [preload for preload in self._preloads if preload.is_due(is_training, is_fresh)]
        for preload in self._preloads if is_training and is_fresh else ():
            if preload.filename is not None and not preload.init_for_train:
                log.info(
                    f"preload_from_files.{preload.name}: {preload.filename} is not loaded in a training ('init_for_train': True "
                    "loads it when one begins)"
                )
        state = loader.state

        def load_all() -> None:
            loaded = load_preloads(due, state.preload)
            if is_fresh and not is_training:  # these are to be all parameters of the model
                require_all(due, {*state.tensors("parameters"), *state.tensors("frozen")}.difference(loaded))
            for preload in due:
                if preload.filename is not None:
                    log.info(f"Loaded {preload.filename} for preload_from_files.{preload.name}.")

        together(loader.comm, load_all, name="preload")


def load_preloads(preloads: Sequence[Preload], load: PreloadFunction) -> list[str]:
    """Load parameters from all files, in this order; return their names.

    Args:
        load: a state's `preload`.

    Raises:
        CheckpointError: a file cannot be read, or parameters are missing from all files.
    """
    loaded: set[str] = set()
    missing_by_preload: list[tuple[Preload, list[str]]] = []
    for preload in preloads:
        if preload.filename is not None:
            file = Path(preload.filename)
            ours, names = load(PreloadRequest(file, preload.checkpoint_key, preload.choose, preload.maker()))
            loaded.update(names)
            missing_by_preload.append((preload, preload.missing(ours, names)))
    for preload, names in missing_by_preload:
        problems = [name for name in names if name not in loaded and not any(entry.allows_missing(name) for entry in preloads)]
        if problems:
            raise preload.error([f"{name}: not in the file" for name in problems])
    return sorted(loaded)


def require_all(preloads: Sequence[Preload], not_loaded: Iterable[str]) -> None:
    """Raises: CheckpointError, if parameters that were not loaded have the values of a new model, and no entry wants that.

    Args:
        left: our parameters that were not loaded.
    """
    if missing := sorted(name for name in not_loaded if not any(preload.keeps(name) for preload in preloads)):
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(
            f"preload_from_files: expected all of the model's parameters, as there is no trained model, got none for "
            f"{', '.join(missing[:5])}{more} (set load to a model file; or have them keep the values of get_model, by an entry "
            f"such as {{'filename': None, 'pattern': '{missing[0]}'}})"
        )
