"""Plug-ins: what the folders of `hvdtrain/plugins/` and other distributions add to hvdtrain, each in the table of its kind.

A distribution names its plug-in in pyproject.toml, and pip does the rest (docs/plugins.md):

    [project.entry-points.hvdtrain]
    foo = "hvdtrain_foo:PLUGIN"

The plug-in itself is light: it has the names of what it adds, and each is imported when it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from hvdtrain.config.absent import import_part
from hvdtrain.config.keys import Section
from hvdtrain.config.source import Source
from hvdtrain.errors import ConfigError

GROUP = "hvdtrain"
"""The group of entry points."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """What a distribution adds. A value 'module:name' is imported when it is used.

    Attributes:
        datasets: by the `class` of a dataset's dict, the subclass of `DatasetKeys` with its opener.
        sources: by the `class` of a dataset's dict, a subclass of `SequenceSource` whose arguments are the other entries.
        steps: by the `class` of a step of a MapDataset's `map_seq`, the subclass of `StepKeys` with its opener.
        backends: by the value of the key `backend`, a `Framework`.
        transports: by name, a function of the settings, and of whether the process may connect its ranks again, which connects
            them: `start_up/ranks.py`.
        launchers: by any name, a class of `Launcher`, which recognizes the processes that it has started, and may start some.
        reducers: by the value of the key `horovod_reduce_type`, a class of `EpochSync` with its `keys`.
        compressions: by the value of the key `horovod_compression`, a `Compression`.
        rate_controls: by the value of the key `learning_rate_control`, a function of the settings that returns a `RateControl`.
        rate_factors: by any name, a function of the settings that returns a function of the numbers of steps and of epochs done,
            a factor on the learning rate; or None.
        schedulers: by the value of `submit --scheduler`, a `Scheduler`.
        callbacks: by any name, a function of the settings that returns callbacks of a training on this rank, objects with methods
            such as `on_epoch_end`; they are called before those of the config.
        tasks: by the value of the key `task`, a function of the settings.
        commands: by the word after `python -m hvdtrain`, a line of help, and the module whose `main(arguments)` runs it.
        trackers: by an entry of the key `trackers`, a class with methods of a tracker.
        reporters: by any name, a function of the settings, the `Session` and the record of the start, which rank 0 calls when a
            training begins; it returns a context manager, open until the training ends, of the `Reporters` that get its numbers.
        recorders: by any name, a function of the settings and the `Session`, which all ranks call when a training begins; it
            returns a context manager, open until the training ends, of a `StepRecorder`, or of None.
        accounts: by any name, a function of the settings, the `Session` and the time at which the start began, which all ranks
            call before a training: it returns a `Goodput`.
        bars: by any name, a `Bars`, which shows how far something is that takes long.
        measures: by the name of an entry in the report of an epoch, a function of the settings and the `Session`, which all ranks
            call when a training begins; it returns a function of each report that returns the entry, a dict of numbers; or None.
        epochs: by any name, a function, `OpenEpochs` in start_up/epochs.py, which all ranks call: it returns what differs between
            the epochs, `Epochs`, or None.
        writers: by any name, a function of the settings that returns what makes an `OutputWriter` for the tasks forward and
            search, or None.
        checkpoint_hooks: by any name, a function of the settings that returns `CheckpointHooks`: what is done with the model
            and the checkpoints of a job when it opens, loads and saves; or None.
        final_models: by any name, a function of the settings, the session and the step log, which all ranks call after the last
            epoch: it makes and evaluates other models of the training, and returns an `Average` for each.
        artifacts: by the name that trackers give a file, a function of the folder with a training's records and of how it ended,
            which writes the file and returns its path, or None.
        savers: by the value of the key `backend`, a function of whether the process may be forked: it returns what writes copies
            of checkpoints while training goes on, a `BackgroundSaver` (learner/contents.py).
        storages: by any name, a `Storage`, which reads data files at URLs.
        caches: by any name, a function of the settings, of datasets that are opened together, and of the number of ranks on this
            host: it returns a `Cache` for each dataset, in which sequences stay once they are read.
        copiers: by any name, a `Copier`, which copies data files to local disks before they are read.
        data_checks: by any name, a `DataCheck`, which compares the data with that of the checkpoint, and between the ranks.
        lengths: by any name, a `LengthFinder`, for lengths that nothing but reading shows.
        adapters: by any name, an `Adapter`, which makes a dataset's dict of a value that another library or program has.
        chunkers: by any name, a `Chunker`, which cuts sequences into parts that are batched as if each were a sequence.
        planners: by any name, a `Planner`, which makes the plan of an epoch on all ranks together.
        mirrors: by any name, a function of a URL that returns a `MirrorProtocol`, where checkpoints are copied to.
        scorings: by any name, a function of the settings, which returns what computes the scores of a dataset, a `Scoring`
            (learner/epoch_scores.py).
        learner_extensions: by any name, a function of the settings and the communicator, which all ranks call before get_model if
            PyTorch trains: it returns a function that changes what the learner is built from, an `Assembly`
            (learner/torch/assembly.py), or None.
        watchdogs: by any name, a function of the settings, the communicator and the purpose of the job, which all ranks call as
            soon as they are connected: it returns a `Watchdog`.
        names: what programs import from hvdtrain, by its name.
        keys: by any name, a subclass of `Section`, or 'module:name': keys at the top level of configs; `settings.of(section)`
            has their values.
        configs: by one of these keys, a function of a config's values that returns keys which follow from them (`get_model` and
            so on). It is called when a config gives that key a value; the config's own values come before the returned ones, and
            beside them in `callbacks` and `epoch_scores`.
        templates: by an option of `init`, a line of help, the package whose file template.txt is that config, and the command
            that installs what it imports, or ''.
        tensors: by the name of a class of arrays in a batch (data/types.py), the dataclass that train_step gets with PyTorch
            (`TENSORS` in learner/torch/tensors.py).
        translations: by the name of another program, the `Translation` of its configs.
        synonyms: by any name, what options of other programs are here, by their names there: for messages about unknown keys.
        needs: by the name of another folder of `hvdtrain/plugins/`, what does not work without it.
    """

    datasets: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    steps: Mapping[str, str] = field(default_factory=dict)
    backends: Mapping[str, str] = field(default_factory=dict)
    transports: Mapping[str, str] = field(default_factory=dict)
    launchers: Mapping[str, str] = field(default_factory=dict)
    reducers: Mapping[str, str] = field(default_factory=dict)
    compressions: Mapping[str, str] = field(default_factory=dict)
    rate_controls: Mapping[str, str] = field(default_factory=dict)
    rate_factors: Mapping[str, str] = field(default_factory=dict)
    schedulers: Mapping[str, str] = field(default_factory=dict)
    callbacks: Mapping[str, str] = field(default_factory=dict)
    tasks: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    trackers: Mapping[str, str] = field(default_factory=dict)
    reporters: Mapping[str, str] = field(default_factory=dict)
    recorders: Mapping[str, str] = field(default_factory=dict)
    accounts: Mapping[str, str] = field(default_factory=dict)
    bars: Mapping[str, str] = field(default_factory=dict)
    measures: Mapping[str, str] = field(default_factory=dict)
    epochs: Mapping[str, str] = field(default_factory=dict)
    writers: Mapping[str, str] = field(default_factory=dict)
    checkpoint_hooks: Mapping[str, str] = field(default_factory=dict)
    final_models: Mapping[str, str] = field(default_factory=dict)
    artifacts: Mapping[str, str] = field(default_factory=dict)
    savers: Mapping[str, str] = field(default_factory=dict)
    storages: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    caches: Mapping[str, str] = field(default_factory=dict)
    copiers: Mapping[str, str] = field(default_factory=dict)
    lengths: Mapping[str, str] = field(default_factory=dict)
    data_checks: Mapping[str, str] = field(default_factory=dict)
    chunkers: Mapping[str, str] = field(default_factory=dict)
    planners: Mapping[str, str] = field(default_factory=dict)
    mirrors: Mapping[str, str] = field(default_factory=dict)
    scorings: Mapping[str, str] = field(default_factory=dict)
    learner_extensions: Mapping[str, str] = field(default_factory=dict)
    watchdogs: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str | type[Section]] = field(default_factory=dict)
    configs: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    translations: Mapping[str, str] = field(default_factory=dict)
    synonyms: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)


class Registry(Mapping[str, T]):
    """The table of a kind: hvdtrain's own entries, then those of plug-ins, which are looked up when the table is first used.

    Args:
        kind: the field of `Plugin` that has the entries of plug-ins.
        builtin: an entry 'module:name' is imported when it is used.
    """

    def __init__(self, kind: str, builtin: Mapping[str, T | str] = MappingProxyType({})) -> None:
        self._kind = kind
        self._builtin = builtin
        self._loaded: dict[str, T] = {}

    @cached_property
    def entries(self) -> Mapping[str, Any]:
        """The entries as they were declared: nothing is imported. Raises: ConfigError, if two have the same name."""
        entries: dict[str, Any] = dict(self._builtin)
        owners = dict.fromkeys(entries, "hvdtrain")
        for where, plugin in plugins().items():
            for name, entry in getattr(plugin, self._kind).items():
                if name in entries:
                    raise ConfigError.of(
                        "duplicate", f"{where}: expected other names of {self._kind} than those of {owners[name]}, got {name!r}"
                    )
                entries[name] = entry
                owners[name] = where
        return entries

    def __getitem__(self, name: str) -> T:
        """Raises: KeyError; ConfigError, if a plug-in's entry cannot be imported."""
        if name not in self._loaded:
            entry = self.entries[name]
            self._loaded[name] = _imported(name, entry) if isinstance(entry, str) else entry
        return self._loaded[name]

    @property
    def last(self) -> T | None:
        """The last entry, of a table of which a job uses one: another distribution's is used in place of hvdtrain's own."""
        return self[list(self.entries)[-1]] if self.entries else None

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


NAMES: Registry[Any] = Registry("names")
"""What programs import from hvdtrain: `hvdtrain.train` and so on."""

SYNONYMS: Registry[Mapping[str, str]] = Registry("synonyms")


def synonym(name: str) -> str | None:
    """What another program's name of an option is here; None: no plug-in knows it."""
    return next((names[name] for names in SYNONYMS.values() if name in names), None)


JOINED = ("callbacks", "epoch_scores", "higher_is_better")
"""Keys with values of which there may be several: the plug-in's come first."""


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return {**first, **second}
    return [*first, *(second if isinstance(second, (list, tuple)) else [second])]


KeysOf = Callable[[Mapping[str, Any]], Mapping[str, Any]]

CONFIGS: Registry[KeysOf] = Registry("configs")


def with_implied_keys(source: Source, names: Mapping[str, str]) -> Source:
    """The config with the keys that follow, by plug-ins, from those that it gives, whose values have been checked.

    Args:
        names: by another name of a key, its name.

    Raises:
        ConfigError: by a plug-in's function.
    """
    values, origins = dict(source.values), dict(source.origins)
    keys_set = {names.get(name, name) for name, value in source.values.items() if value is not None}
    for name in keys_with_others(source.values):
        implied = CONFIGS[name](MappingProxyType(source.values))
        for key, value in implied.items():
            if key in keys_set:
                if key not in JOINED:
                    continue
                value = _joined(value, values[key])
            elif key not in source.values and key in values:
                raise ConfigError.of("conflict", f"{key}: expected it from {origins[key]} or from {name}, got both")
            values[key] = value
            origins[key] = name
    return replace(source, values=values, origins=origins)


def keys_with_others(values: Mapping[str, Any]) -> list[str]:
    """The keys of a config from which others follow."""
    return [name for name in CONFIGS if values.get(name) not in (None, "")]


def _imported(name: str, reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    if module.partition(".")[0] == "hvdtrain":
        return getattr(import_part(module), attribute)
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:
        raise ConfigError.of(
            "cannot-import", f"plug-in's {name}: expected {reference} to be imported, got {type(error).__name__}: {error}"
        ) from error


@cache
def plugins() -> Mapping[str, Plugin]:
    """The plug-ins by name, hvdtrain's own first, then those of distributions as 'plug-in NAME of DISTRIBUTION'.

    Raises:
        ConfigError: one cannot be imported.
    """
    names = sorted(path.parent.name for path in (Path(__file__).parents[1] / "plugins").glob("*/__init__.py"))
    by_origin: dict[str, Plugin] = {f"plug-in {name}": import_module(f"hvdtrain.plugins.{name}").PLUGIN for name in names}
    for folder in _distributions():
        from importlib.metadata import PathDistribution  # here: its import takes as long as half of numpy's

        distribution = PathDistribution(folder)
        for point in distribution.entry_points.select(group=GROUP):
            where = f"plug-in {point.name} of {distribution.name}"
            try:
                plugin = point.load()
            except Exception as error:
                raise ConfigError.of(
                    "cannot-import",
                    f"{where}: expected {point.value} to be imported, got {type(error).__name__}: {error} "
                    f"(pip uninstall {distribution.name} removes it)",
                ) from error
            if not isinstance(plugin, Plugin):
                raise ConfigError.of(
                    "wrong-type", f"{where}: expected a hvdtrain.Plugin in {point.value}, got {type(plugin).__name__}"
                )
            for kind in fields(Plugin):
                if not isinstance(table := getattr(plugin, kind.name), Mapping):
                    raise ConfigError.of("wrong-type", f"{where}: expected a dict of {kind.name}, got {table!r}")
            by_origin[where] = plugin
    return by_origin


def _distributions() -> Iterator[Path]:
    """The metadata of distributions with entry points of `GROUP`, the first of each name.

    importlib.metadata has this, too, but parses all entry points of all distributions: 30 ms instead of 3.
    """
    seen: set[str] = set()
    for folder in map(Path, sys.path):
        try:
            names = sorted(path.name for path in folder.iterdir() if path.suffix in (".dist-info", ".egg-info"))
        except OSError:  # a zip file, or no folder
            continue
        for name in names:
            distribution = name.partition("-")[0].lower()
            try:
                text = (folder / name / "entry_points.txt").read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if f"[{GROUP}]" in text and distribution not in seen:
                seen.add(distribution)
                yield folder / name
