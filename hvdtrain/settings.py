"""All keys of a config in one frozen object, assembled from the sections, each declared next to the code it configures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from hvdtrain.checkpoint.keys import SavingKeys, StartKeys
from hvdtrain.comm.alike import OF_LOCAL_UPDATES, OWN_FOLDERS, OWN_KEYS
from hvdtrain.comm.keys import LaunchKeys, TorchDistributedKeys, torch_distributed_of
from hvdtrain.config.check import build, unknown_keys, unread_line
from hvdtrain.config.children import is_reading_for_child
from hvdtrain.config.foreign import ALIASES, Watches
from hvdtrain.config.keys import Key, Section, Sections, declared_keys, spellings
from hvdtrain.config.overrides import COMMAND_LINE
from hvdtrain.config.plugins import Registry, keys_with_others, with_implied_keys
from hvdtrain.config.source import Config, Source, load
from hvdtrain.config.value_text import as_text, value_text
from hvdtrain.data.keys import DataKeys, DatasetSpec
from hvdtrain.data.kinds import KINDS, STEPS
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.errors import ConfigError, Problem, problem
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.precision import PrecisionKeys
from hvdtrain.learner.reducers import KEYS_OF_REDUCERS, ReduceKeys
from hvdtrain.learner.steps import AccumulationKeys
from hvdtrain.runtime.interrupt import InterruptKeys
from hvdtrain.runtime.log import LogKeys
from hvdtrain.runtime.process import OWN, Process
from hvdtrain.runtime.records import records_of
from hvdtrain.schedule.early_stopping import EarlyStoppingKeys
from hvdtrain.schedule.measure import Measure, ScoreKeys, wanted_of
from hvdtrain.schedule.rates import ScheduleKeys
from hvdtrain.training.callbacks import CallbackKeys
from hvdtrain.training.derived import DERIVED, framework_problems, resolve
from hvdtrain.training.keys import EvaluationKeys
from hvdtrain.training.run_keys import RunKeys

S = TypeVar("S", bound=Section)


OF_PLUGINS: Registry[type[Section]] = Registry("keys")
"""The sections of plug-ins."""

DICTS: dict[str, type] = {
    "torch_distributed": TorchDistributedKeys,
    **{name: entries for keys in (*OF_PLUGINS.values(), *KEYS_OF_REDUCERS.values()) for name, entries in keys.dicts.items()},
}
"""Keys that are dicts with declared entries."""

SPELLINGS: tuple[tuple[str, ...], ...] = (
    *ALIASES.items(),
    ("batching", "train.seq_ordering"),
    ("dist_rank", "torch_distributed.rank"),
    ("dist_world_size", "torch_distributed.world_size"),
    ("dist_init_method", "torch_distributed.init_method", "dist_master_addr"),
    ("dist_init_method", "torch_distributed.init_method", "dist_master_port"),
)
"""The names of one thing that are keys of their own: the later one of a config's files and the command line holds."""

DATASET_SECTIONS: tuple[type, ...] = (*KINDS.values(), *STEPS.values(), OrderKeys)


@dataclass(frozen=True)
class Settings:
    """A checked config."""

    run: RunKeys
    data: DataKeys
    batch: BatchKeys
    learner: LearnerKeys
    precision: PrecisionKeys
    accumulation: AccumulationKeys
    schedule: ScheduleKeys
    scoring: ScoreKeys
    reduce: ReduceKeys
    start: StartKeys
    saving: SavingKeys
    interrupt: InterruptKeys
    ending: EarlyStoppingKeys
    launch: LaunchKeys
    torch_distributed: TorchDistributedKeys | None
    log: LogKeys
    callbacks: CallbackKeys
    evaluation: EvaluationKeys
    datasets: tuple[DatasetSpec, ...]
    """Train first, then those that are evaluated after every epoch."""
    forward: DatasetSpec | None
    expected: Mapping[str, Any]
    """By data key, its entry in `extern_data`: `hvdtrain.data.expected.Expected`."""
    function: Callable[[], Any] | None
    warnings: tuple[str, ...]
    """Messages about values that are changed or ignored, and about names that look like misspelt keys."""
    notes: tuple[str, ...]
    """Messages about keys that have no effect here."""
    outside_datasets: Mapping[str, tuple[Any, str]]
    """By name, value and origin of the keys of a dataset's dict that the config sets at its top level."""
    origins: Mapping[str, str]
    """By key, where its value comes from. Keys with their default value are not listed."""
    texts: Mapping[str, str]
    """The text of each config file, by its path."""
    source: Source
    """The config's values, from which the settings of an epoch are made."""
    of_plugins: tuple[Section, ...] = ()
    """The sections of plug-ins."""
    process: Process = OWN
    """What hvdtrain may change in the process that it runs in."""

    @cached_property
    def sections(self) -> dict[type, Any]:
        """All sections by their classes; `DICTS` are none."""
        return {type(section): section for section in (*vars(self).values(), *self.of_plugins) if type(section) in SECTIONS}

    def of(self, section: type[S]) -> S:
        """The values of a plug-in's keys."""
        keys: S = self.sections[section]
        return keys

    def with_keys(self, **values: Any) -> Settings:
        """The settings with other values of keys of plug-ins; those of one that is missing are left out."""
        return replace(self, of_plugins=tuple(_with_keys(section, values) for section in self.of_plugins))

    @property
    def files(self) -> list[Path]:
        """The config files."""
        return list(map(Path, self.texts))

    @property
    def train(self) -> DatasetSpec:
        return self.datasets[0]

    @property
    def records(self) -> Path:
        """The folder with the training's records: scores.jsonl and so on."""
        return records_of(Path(self.run.model))

    @property
    def measure(self) -> Measure:
        """How epochs are compared."""
        wanted = self.ending.early_stopping_measure or self.schedule.learning_rate_control_error_measure
        return Measure(wanted_of(wanted), self.scoring.higher_is_better)

    @property
    def shared_keys(self) -> dict[str, str]:
        """By name, as text, the values that have to be the same on all ranks."""
        own_keys = OWN_KEYS | (OF_LOCAL_UPDATES if self.reduce.updates_alone else frozenset())
        if self.reduce.dataset_distribution != "shard":
            own_keys |= {"random_seed"}
        texts = {name: "None" if value is None else "a folder" for name, value in self._named_values() if name in OWN_FOLDERS}
        for name, value in self._named_values():
            if name not in own_keys and name not in OWN_FOLDERS:
                text = as_text(value)
                texts[name] = value_text(value) if text is None else text
        return texts | {"evaluated datasets": repr([spec.name for spec in self.evaluations])}

    def _named_values(self) -> Iterator[tuple[str, Any]]:
        """All keys with their values; the own entries of torch_distributed with the dict's name."""
        sections = [("", section) for section in self.sections.values()]
        if self.torch_distributed is not None:
            sections.append(("torch_distributed.", self.torch_distributed))
        for prefix, section in sections:
            yield from ((f"{prefix}{key.name}", getattr(section, key.field)) for key in declared_keys(type(section)))

    @property
    def misplaced_keys(self) -> tuple[str, ...]:
        """Messages about keys of datasets that are outside of a dataset's dict, unless a dataset has that value, too."""
        orders = [spec.order for dataset in self.datasets for spec in dataset.all()]
        return tuple(
            f'{name} in {origin}: read in the dict of a dataset only, such as train = {{"class": ..., "{name}": ...}}'
            for name, (value, origin) in self.outside_datasets.items()
            if not any(getattr(order, name) == value for order in orders)
        )

    @property
    def evaluations(self) -> tuple[DatasetSpec, ...]:
        return self.datasets[1:]


def _with_keys(section: S, values: Mapping[str, Any]) -> S:
    return replace(section, **{name: value for name, value in values.items() if hasattr(section, name)})  # type: ignore[type-var]


SECTIONS_BY_NAME: dict[str, type] = {
    name: kind for name, kind in get_type_hints(Settings).items() if isinstance(kind, type) and kind.__name__.endswith("Keys")
}
"""The sections, by the attribute of Settings that holds them; a new one is a line there."""

SECTIONS = (*SECTIONS_BY_NAME.values(), *OF_PLUGINS.values())


def all_keys() -> list[Key]:
    """Every key at the top level of a config."""
    return [declared_key for section in SECTIONS for declared_key in declared_keys(section)]


def entries_of(name: str) -> list[Key]:
    """The entries of a dict among `DICTS`, each with its name in the dict."""
    spelled = [(key, spelling.partition(".")) for key in all_keys() for spelling in key.names]
    spelled_entries = [replace(key, name=entry) for key, (outer, _, entry) in spelled if outer == name and entry]
    return [*declared_keys(DICTS[name]), *spelled_entries]


BOOLEAN_KEYS = frozenset(declared_key.name for declared_key in all_keys() if declared_key.type is bool)
"""The keys that are true or false."""


def read_settings(configs: Sequence[Config], overrides: Mapping[str, Any], origin: str = COMMAND_LINE) -> Settings:
    """Read configs under overrides. What their code draws at random is the same on all ranks and in every start.

    Args:
        configs: files, or keys and values.
        origin: of the overrides: the command line, whose values are text, or a call, whose values are Python objects.

    Raises:
        ConfigError: with all problems.
    """
    keys = {declared_key.name: declared_key for declared_key in all_keys()}
    types = {name: declared_key.type for name, declared_key in keys.items()}
    types |= {alias: types[name] for alias, name in ALIASES.items() if name in types}
    watches = Watches()
    names = [*(each.names for each in keys.values()), *SPELLINGS]
    notes: list[str] = []
    seeded = partial(_seeded, overrides.get("random_seed"), notes)
    source = load(configs, overrides, types, watches.builtins, origin, names, seeded)
    source = replace(source, notes=(*source.notes, *notes))
    homes = {name: _from_home(source.values[name]) for name in OF_HOME if name in source.values}
    source = replace(source, values=source.values | homes)
    if keys_with_others(source.values):
        _check_given(watches.translate(source, keys, BOOLEAN_KEYS))
        source = with_implied_keys(source, ALIASES)
    return check(watches.translate(source, keys, BOOLEAN_KEYS), list(keys))


def _check_given(source: Source) -> None:
    """Before other keys follow from them: nothing is missing yet. Raises: ConfigError, if values are wrong."""
    found = [each for kind in SECTIONS for each in build(kind, _with_placeholders(source.values), "", source.origins)[1]]
    if wrong := [each for each in found if each.rule != "missing"]:
        raise ConfigError(wrong)


@contextmanager
def _seeded(value: Any, notes: list[str]) -> Iterator[None]:
    """What a config's code draws while it is read is made from `random_seed`, as far as that is known before.

    A process that the config starts has its former state again afterwards: those of a pool would all draw the same noise.
    """

    def note() -> None:
        notes.append("the config draws random numbers while it is read: the same in every start (others with ++random_seed N)")

    from hvdtrain.data.randomness import own_numbers, seeded_config  # here: numpy would make `--help` slower

    try:
        seed = abs(int(RunKeys.random_seed if value is None else value))
    except (TypeError, ValueError, OverflowError):  # which is reported when the key is read
        seed = 0
    with own_numbers(seed) if is_reading_for_child() else nullcontext(), seeded_config(seed, note):
        yield


OF_HOME = ("model", "load", "import_model_train_epoch1", "log", "checkpoint_local")
"""Keys whose paths may begin with ~, which a shell leaves in `++model=~/exp/model` and a config in its text."""


def _from_home(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_home(each) for each in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def check(source: Source, names: list[str]) -> Settings:
    """Turn names and values into sections. Raises: ConfigError, with all problems."""
    values = _with_placeholders(source.values)
    origins = source.origins
    entries = [
        *((name, entries_of(name)) for name in DICTS),
        *(("train", declared_keys(section)) for section in DATASET_SECTIONS),
    ]
    inside = {each.name: f"{outer}.{each.name}" for outer, keys in entries for each in keys}
    unknown, look_alikes = unknown_keys(source, [*names, *ALIASES], inside)
    problems = [*source.problems, *unknown]
    built: dict[type, Any] = {}
    problems_by_section: dict[type, list[Problem]] = {}
    for kind in SECTIONS:
        built[kind], problems_by_section[kind] = build(kind, values, "", origins)
    torch_distributed, connecting = _torch_distributed(Sections(built, values), origins)
    built, torch_distributed = resolve(built, torch_distributed)
    sections = Sections(built, values)
    for kind, section in built.items():
        problems += problems_by_section[kind] + ([] if section is None else section.problems(sections))
    problems += connecting + framework_problems(built)
    derived: dict[str, Any] = {}
    for name, derive in DERIVED.items():
        derived[name], more = derive(sections, source)
        problems += more
    if problems:
        raise ConfigError(problems)
    several = {each.name: [*spellings(each, values)][-1:] for each in all_keys() if len(each.names) > 1}
    in_dicts = {name: origins[spelling.partition(".")[0]] for name, spelled in several.items() for spelling in spelled}
    return Settings(
        **{name: built[kind] for name, kind in SECTIONS_BY_NAME.items()},
        **derived,
        of_plugins=tuple(built[kind] for kind in OF_PLUGINS.values()),
        torch_distributed=torch_distributed,
        origins={name: origin for name, origin in origins.items() if name in names} | in_dicts,
        texts=source.texts,
        source=source,
        warnings=(*source.warnings, *look_alikes),
        notes=(*source.notes, *unread_line(source, [*names, *ALIASES])),
    )


def with_datasets(settings: Settings) -> Settings:
    """Settings to train with: calls the config's functions that return datasets, and checks these datasets.

    Raises:
        ConfigError: with all problems of the functions and of what they returned.
    """
    specs = (*settings.datasets, *(() if settings.forward is None else (settings.forward,)))
    if all(spec.is_known for spec in specs):
        return settings
    from hvdtrain.data.config_datasets import call_data_functions

    more = ("forward_data", "search_data") if settings.forward is not None else ()
    data, problems = call_data_functions(settings.data, ("train", "dev", "eval", *more))
    sections = Sections({**settings.sections, DataKeys: data})
    source = Source({}, dict(settings.origins), ())
    derived: dict[str, Any] = {}
    for name in ("datasets", "forward"):
        derived[name], wrong = DERIVED[name](sections, source)
        problems += wrong
    if problems:
        raise ConfigError(problems)
    return replace(settings, **derived)


DATASETS = ("train", "dev", "eval")


def _with_placeholders(values: dict[str, Any]) -> dict[str, Any]:
    """The values, with placeholders for the keys that only training uses if the task does not train.

    Such a task writes no checkpoint, so `model` may be missing; files then go to the working folder.
    """
    task = values.get("task")
    if values.get("model") in (None, "") and task in ("forward", "search", "eval", "dry_run", "find_batch_size"):
        values = {**values, "model": os.path.join(os.curdir, task)}
    if values.get("learning_rates") is None and task in ("forward", "search", "eval", "summary", "cleanup_old_models"):
        values = {"learning_rate": 1.0, **values}
    if task not in ("forward", "search"):
        return values
    unused: dict[str, Any] = {"train": [{}]}  # not opened
    if values.get("forward_step") is not None:
        unused["train_step"] = lambda **_: None
    return values | {name: value for name, value in unused.items() if values.get(name) is None}


def _torch_distributed(sections: Sections, origins: Mapping[str, str]) -> tuple[TorchDistributedKeys | None, list[Problem]]:
    """The entries of torch_distributed, or None if it is not used; the problems."""
    reduce = sections.get(ReduceKeys)
    launch = sections.get(LaunchKeys)
    if reduce is None or launch is None or (reduce.torch_distributed is None and not launch.ask_for_torch):
        return None, []
    if reduce.use_horovod and reduce.torch_distributed is None:
        return None, problem(
            "conflict",
            "use_horovod: expected mpirun, horovodrun or srun to start the processes, got ngpu (in a call: ranks) or dist_ keys, "
            "which belong to torch.distributed (mpirun -np N ..., or leave use_horovod out)",
        )
    entry_names = [each.name for each in entries_of("torch_distributed")]
    origin = origins.get("torch_distributed", COMMAND_LINE)
    keys, problems = torch_distributed_of(reduce.torch_distributed or {}, entry_names, sections, origin)
    return keys, problems
