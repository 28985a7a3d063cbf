"""All keys of a config in one frozen object, assembled from the sections, each declared next to the code it configures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from hvdtrain.checkpoint.average_rules import average_measures
from hvdtrain.checkpoint.changed_keys import as_text, key_texts
from hvdtrain.checkpoint.keys import SavingKeys, StartKeys
from hvdtrain.comm.alike import OF_LOCAL_UPDATES, OWN_FOLDERS, OWN_KEYS
from hvdtrain.comm.keys import LaunchKeys, TorchDistributedKeys, torch_distributed_of
from hvdtrain.config.check import build, unknown_keys, unread_line, unsupported_keys
from hvdtrain.config.convert import signature_error
from hvdtrain.config.foreign import ALIASES, Watches
from hvdtrain.config.keys import (
    REQUIRED,
    Key,
    Rule,
    Section,
    Sections,
    declared_keys,
    key,
    not_negative,
    one_of,
    parsed_by,
    positive,
    spellings,
)
from hvdtrain.config.overrides import COMMAND_LINE
from hvdtrain.config.plugins import Registry, with_implied_keys
from hvdtrain.config.source import Config, Source, load
from hvdtrain.config.value_text import value_text
from hvdtrain.data.combine.step_keys import STEPS
from hvdtrain.data.copies import CopyKeys
from hvdtrain.data.keys import DataKeys, DatasetSpec
from hvdtrain.data.kinds import KINDS
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.chunk_keys import ChunkKeys
from hvdtrain.data.plan.order_keys import OrderKeys, is_random
from hvdtrain.data.remote import RemoteFile, is_remote, package_problems
from hvdtrain.errors import ConfigError, Problem, problem
from hvdtrain.learner.compression import COMPRESSIONS
from hvdtrain.learner.frameworks import FRAMEWORKS, Feature, backends_with
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.model_format import SAFETENSORS
from hvdtrain.learner.outer import OuterKeys
from hvdtrain.learner.precision import PrecisionKeys
from hvdtrain.learner.reducers import ReduceKeys
from hvdtrain.learner.steps import AccumulationKeys
from hvdtrain.learner.sync_interval import SyncRuleKeys
from hvdtrain.runtime.interrupt import InterruptKeys
from hvdtrain.runtime.log import LogKeys
from hvdtrain.runtime.process import OWN, Process
from hvdtrain.runtime.records import records_of
from hvdtrain.schedule.early_stopping import EarlyStoppingKeys
from hvdtrain.schedule.last_best import LastBestKeys, LastBestRule
from hvdtrain.schedule.measure import FALLBACK, Measure, ScoreKeys, wanted_of
from hvdtrain.schedule.rates import NewbobKeys, ScheduleKeys
from hvdtrain.schedule.steps import StepSchedule, make_schedule
from hvdtrain.training.callbacks import CallbackKeys
from hvdtrain.training.keys import EvaluationKeys, ForwardKeys, PerEpochKeys, parse_placements
from hvdtrain.training.trace import TraceKeys

S = TypeVar("S", bound=Section)

TASKS: Registry[Callable[[Settings], Any]] = Registry(
    "tasks",
    {
        "train": "hvdtrain.run:train",
        "dry_run": "hvdtrain.tasks.dry_run:dry_run",
        "find_batch_size": "hvdtrain.tasks.batch_size:find_batch_size",
        "summary": "hvdtrain.tasks.inspect:summarize",
        "find_learning_rate": "hvdtrain.tasks.find_learning_rate:find_learning_rate",
        "eval": "hvdtrain.tasks.tasks:evaluate_all",
        "forward": "hvdtrain.tasks.tasks:forward_all",
        "search": "hvdtrain.tasks.tasks:forward_all",
        "cleanup_old_models": "hvdtrain.tasks.tasks:clean_up_all",
    },
)
"""By value of the key `task`, the function that runs it; imported when it is called."""


def _is_task(value: str) -> bool:
    return value in TASKS or value.startswith("config:")


@dataclass(frozen=True, kw_only=True)
class RunKeys(Section):
    """The run as a whole."""

    task: str = key(
        "train",
        "what to do: train; dry_run, find_batch_size, summary and find_learning_rate, as the options --dry-run, "
        "--find-batch-size, --summary and --find-learning-rate; "
        "eval (dev, eval, eval_datasets); forward or search (forward_data, "
        "search_data); cleanup_old_models; or config:NAME, which calls the config's function NAME",
        Rule(f"one of {', '.join(TASKS)}, config:NAME (export is a command: python -m hvdtrain export CONFIG)", _is_task),
    )
    backend: str = key("torch", "the framework of get_model and train_step", one_of(FRAMEWORKS))
    model: str = key(
        REQUIRED,
        "where checkpoints go: the beginning of their names, such as exp/g2p/model",
        Rule("a path on a disk (checkpoint_mirror copies checkpoints to a URL)", lambda value: not is_remote(value)),
    )
    num_epochs: int = key(5, "train up to this epoch", positive)
    random_seed: int = key(
        42, "for initial weights, dropout, random items and the like (the order of sequences goes by the epoch)", not_negative
    )
    num_threads: int | None = key(
        None,
        "threads a rank computes with; None: OMP_NUM_THREADS, or the host's cores divided among its ranks",
        Rule("a positive number up to 65536", lambda value: 0 < value <= 65536),
    )
    overfit_batches: int | None = key(
        None,
        "train on the first N batches of every rank again and again, from the start and in a separate folder, overfit/ next to "
        "the model: a sound model and learning rate bring their loss close to zero",
        positive,
    )
    startup_callback: Callable[..., None] | str | None = key(
        None,
        "function {signature} that every rank calls before the datasets are opened; hvdtrain.run_on_main in it "
        "prepares data once",
        signature="**_",
    )
    watchdog_timeout: float | None = key(
        None,
        "end the job when a rank makes no progress for this many seconds; None: for 20 times the longest step, evaluation step "
        "or saving so far, at least 60 s; at least 300 s after the first one, and 1800 s where none is known yet (while the "
        "job starts or ends, and in callbacks, at least 1800 s in any case)",
        positive,
    )
    predict_ranks: int | str | tuple[Any, ...] | list[Any] | None = key(
        None,
        "numbers of ranks for which --dry-run predicts the speed, such as '2,8,64:4' (64 ranks, 4 on each host; else as many as "
        "there are on each now)",
        Rule("numbers of ranks such as 8, '2,8,64', or RANKS:RANKS_PER_HOST", parsed_by(parse_placements)),
    )


DICTS: dict[str, type] = {
    "torch_distributed": TorchDistributedKeys,
    "horovod_param_outer": OuterKeys,
    "horovod_param_sync_rule": SyncRuleKeys,
    "use_last_best_model": LastBestRule,
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
    copies: CopyKeys
    batch: BatchKeys
    chunks: ChunkKeys
    learner: LearnerKeys
    precision: PrecisionKeys
    accumulation: AccumulationKeys
    schedule: ScheduleKeys
    newbob: NewbobKeys
    last_best: LastBestKeys
    scoring: ScoreKeys
    step_schedule: StepSchedule | None
    reduce: ReduceKeys
    start: StartKeys
    saving: SavingKeys
    interrupt: InterruptKeys
    ending: EarlyStoppingKeys
    forwarding: ForwardKeys
    per_epoch: PerEpochKeys
    launch: LaunchKeys
    torch_distributed: TorchDistributedKeys | None
    log: LogKeys
    callbacks: CallbackKeys
    evaluation: EvaluationKeys
    trace: TraceKeys
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

    @property
    def sections(self) -> dict[type, Any]:
        """All sections by their classes; `DICTS` are none."""
        return {type(section): section for section in (*vars(self).values(), *self.of_plugins) if type(section) in SECTIONS}

    def of(self, section: type[S]) -> S:
        """The values of a plug-in's keys."""
        found: S = self.sections[section]
        return found

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
        wanted = self.ending.early_stopping_measure or self.newbob.learning_rate_control_error_measure
        return Measure(wanted_of(wanted), self.scoring.higher_is_better)

    @property
    def result_keys(self) -> dict[str, str]:
        """By name, as text, the keys that determine the results of a training."""
        sections = (
            self.batch,
            self.chunks,
            self.learner,
            self.precision,
            self.accumulation,
            self.schedule,
            self.newbob,
            self.last_best,
            self.reduce,
        )
        found = key_texts([*(("", section) for section in sections), ("train.", self.train.order)])
        found["random_seed"] = str(self.run.random_seed)
        of_twice_as_many, _ = make_schedule(self.schedule.learning_rate_schedule, 2 * self.run.num_epochs)
        if self.step_schedule != of_twice_as_many:
            found["num_epochs"] = str(self.run.num_epochs)
        return found

    @property
    def shared_keys(self) -> dict[str, str]:
        """By name, as text, the values that have to be the same on all ranks."""
        own = OWN_KEYS | (OF_LOCAL_UPDATES if self.reduce.updates_alone else frozenset())
        if self.reduce.dataset_distribution != "shard":
            own |= {"random_seed"}
        found = {name: "None" if value is None else "a folder" for name, value in self._named_values() if name in OWN_FOLDERS}
        for name, value in self._named_values():
            if name not in own and name not in OWN_FOLDERS:
                text = as_text(value)
                found[name] = value_text(value) if text is None else text
        return found | {"evaluated datasets": repr([spec.name for spec in self.evaluations])}

    def _named_values(self) -> Iterator[tuple[str, Any]]:
        """All keys with their values; the own entries of torch_distributed with the dict's name."""
        sections = [("", section) for section in self.sections.values()]
        if self.torch_distributed is not None:
            sections.append(("torch_distributed.", self.torch_distributed))
        for prefix, section in sections:
            yield from ((f"{prefix}{one.name}", getattr(section, one.field)) for one in declared_keys(type(section)))

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


SECTIONS_BY_NAME: dict[str, type] = {
    name: kind for name, kind in get_type_hints(Settings).items() if isinstance(kind, type) and kind.__name__.endswith("Keys")
}
"""The sections, by the attribute of Settings that holds them; a new one is a line there."""

OF_PLUGINS: Registry[type[Section]] = Registry("keys")
"""The sections of plug-ins."""

SECTIONS = (*SECTIONS_BY_NAME.values(), *OF_PLUGINS.values())


def all_keys() -> list[Key]:
    """Every key at the top level of a config."""
    return [declared_key for section in SECTIONS for declared_key in declared_keys(section)]


def entries_of(name: str) -> list[Key]:
    """The entries of a dict among `DICTS`, each with its name in the dict."""
    spelled = [(found, spelling.partition(".")) for found in all_keys() for spelling in found.names]
    others = [replace(found, name=entry) for found, (outer, _, entry) in spelled if outer == name and entry]
    return [*declared_keys(DICTS[name]), *others]


BOOLEAN_KEYS = frozenset(declared_key.name for declared_key in all_keys() if declared_key.type is bool)
"""The keys that are true or false."""


def read_settings(configs: Sequence[Config], overrides: Mapping[str, Any], origin: str = COMMAND_LINE) -> Settings:
    """Read configs under overrides.

    Args:
        configs: files, or keys and values.
        origin: of the overrides: the command line, whose values are text, or a call, whose values are Python objects.

    Raises:
        ConfigError: with all problems.
    """
    keys = {declared_key.name: declared_key for declared_key in all_keys()}
    types = {name: declared_key.type for name, declared_key in keys.items()}
    types |= {alias: types[name] for alias, name in ALIASES.items()}
    watches = Watches()
    source = load(configs, overrides, types, watches.builtins, origin, [*(each.names for each in keys.values()), *SPELLINGS])
    homes = {name: _from_home(source.values[name]) for name in OF_HOME if name in source.values}
    source = with_implied_keys(replace(source, values=source.values | homes), keys, ALIASES)
    return check(watches.translate(source, keys, BOOLEAN_KEYS), list(keys))


OF_HOME = ("model", "load", "import_model_train_epoch1", "log", "checkpoint_local")
"""Keys whose paths may begin with ~, which a shell leaves in `++model=~/exp/model` and a config in its text."""


def _from_home(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_home(each) for each in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def check(source: Source, names: list[str]) -> Settings:
    """Turn names and values into sections. Raises: ConfigError, with all problems."""
    values, origins = _with_placeholders(source.values), source.origins
    entries = [
        *((name, entries_of(name)) for name in DICTS),
        *(("train", declared_keys(section)) for section in DATASET_SECTIONS),
    ]
    inside = {each.name: f"{place}.{each.name}" for place, keys in entries for each in keys}
    unknown, look_alikes = unknown_keys(source, [*names, *ALIASES], inside)
    problems = [*source.problems, *unknown]
    built: dict[type, Any] = {}
    found: dict[type, list[Problem]] = {}
    for kind in SECTIONS:
        built[kind], found[kind] = build(kind, values, "", origins)
    torch_distributed, connecting = _torch_distributed(Sections(built, values), origins)
    built, torch_distributed = resolve(built, torch_distributed)
    sections = Sections(built, values)
    for kind, section in built.items():
        problems += found[kind] + ([] if section is None else section.problems(sections))
    problems += connecting + _framework_problems(built)
    derived: dict[str, Any] = {}
    for name, derive in DERIVED.items():
        derived[name], more = derive(sections, source)
        problems += more
    if problems:
        raise ConfigError(problems)
    several = {each.name: [*spellings(each, values)][-1:] for each in all_keys() if len(each.names) > 1}
    in_dicts = {name: origins[spelling.partition(".")[0]] for name, given in several.items() for spelling in given}
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


def resolve(
    built: Mapping[type, Any], torch_distributed: TorchDistributedKeys | None
) -> tuple[dict[type, Any], TorchDistributedKeys | None]:
    """The sections, with the values that follow from other sections filled in."""
    result = dict(built)
    started, learner = built[LaunchKeys], built[LearnerKeys]
    if started is not None and learner is not None and started.ngpu == 0 and learner.device is None:
        result[LearnerKeys] = replace(learner, device="cpu")
    chunks, run = built[ChunkKeys], built[RunKeys]
    if chunks is not None and run is not None:
        drops = "short chunks dropped" in FRAMEWORKS[run.backend].features
        drops = drops and bool(chunks.min_chunk_size)  # without a minimum, both rules are the same
        result[ChunkKeys] = replace(chunks, chunking_tail=chunks.chunking_tail or ("drop_short" if drops else "keep"))
    if torch_distributed is None:
        return result, None
    rank = started.dist_rank if torch_distributed.rank is None else torch_distributed.rank
    size = torch_distributed.world_size or started.dist_world_size
    result[LaunchKeys] = replace(started, dist_rank=rank, dist_world_size=size)
    return result, replace(torch_distributed, init_method=torch_distributed.init_method or started.init_method)


def with_datasets(settings: Settings) -> Settings:
    """Settings to train with: calls the config's functions that return datasets, and checks these datasets.

    Raises:
        ConfigError: with all problems of the functions and of what they returned.
    """
    specs = (*settings.datasets, *(() if settings.forward is None else (settings.forward,)))
    if all(spec.is_known for spec in specs):
        return settings
    from hvdtrain.data.sources import call_data_functions  # here, as in _datasets

    more = ("forward_data", "search_data") if settings.forward is not None else ()
    data, problems = call_data_functions(settings.data, ("train", "dev", "eval", *more))
    sections, source = Sections({**settings.sections, DataKeys: data}), Source({}, dict(settings.origins), ())
    found: dict[str, Any] = {}
    for name in ("datasets", "forward"):
        found[name], wrong = DERIVED[name](sections, source)
        problems += wrong
    if problems:
        raise ConfigError(problems)
    return replace(settings, **found)


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
    unused: dict[str, Any] = {"train": {"class": "DummyDataset", "input_dim": 1, "output_dim": 1, "num_seqs": 1}}  # not opened
    if values.get("forward_step") is not None:
        unused["train_step"] = lambda **_: None
    return values | {name: value for name, value in unused.items() if values.get(name) is None}


def _framework_problems(built: Mapping[type, Any]) -> list[Problem]:
    """Problems with keys that the config's framework does not support."""
    learner, reduce, run, started = (built[section] for section in (LearnerKeys, ReduceKeys, RunKeys, LaunchKeys))
    if None in (learner, reduce, run, started):
        return []
    problems = unsupported_keys([section for section in built.values() if section is not None], run.backend)
    features = FRAMEWORKS[run.backend].features
    saving = built[SavingKeys]
    framework = FRAMEWORKS[run.backend]
    formats = (None, framework.model_suffix) if framework.model_suffix else (None, framework.suffix, SAFETENSORS)
    if saving is not None and saving.checkpoint_format not in formats:
        wanted = " or ".join(repr(name) for name in formats if name)
        problems += problem(
            "needs-backend",
            f"checkpoint_format: expected {wanted} with backend {run.backend!r}, got {saving.checkpoint_format!r}",
        )
    preloads = built[StartKeys].preload_from_files if built[StartKeys] is not None else {}
    for name, entry in preloads.items() if "constant parameters" not in features else ():
        if isinstance(entry, dict) and entry.get("init_for_train") == "always":
            where = f"preload_from_files.{name}.init_for_train"
            problems += problem(
                "needs-backend", f"{where}: expected {_with_feature('constant parameters')} for 'always', got {run.backend!r}"
            )
    compression = COMPRESSIONS.get(reduce.compression or "")
    if compression is not None and compression.narrow is None and "computed compression" not in features:
        wanted = _with_feature("computed compression")
        problems += problem(
            "needs-backend", f"horovod_compression: expected {wanted} for {reduce.compression!r}, got {run.backend!r}"
        )
    if learner.deterministic and reduce.sync_seconds is not None:
        problems += problem(
            "conflict",
            "deterministic: expected syncs after a number of steps, got horovod_param_sync_time_diff, which goes by the clock",
        )
    by_launcher = started.ask_for_torch and reduce.torch_distributed is None and not reduce.use_horovod
    if by_launcher and "torch.distributed" not in features:
        wanted = _with_feature("torch.distributed")
        problems += problem(
            "needs-backend", f"torch_distributed: expected {wanted}, got {run.backend!r} (use_horovod connects it)"
        )
    return problems


def _with_feature(feature: Feature) -> str:
    return f"backend = {backends_with(feature)}"


def _torch_distributed(sections: Sections, origins: Mapping[str, str]) -> tuple[TorchDistributedKeys | None, list[Problem]]:
    """The entries of torch_distributed, or None if it is not used; the problems."""
    reduce, started = sections.get(ReduceKeys), sections.get(LaunchKeys)
    if reduce is None or started is None or (reduce.torch_distributed is None and not started.ask_for_torch):
        return None, []
    if reduce.use_horovod and reduce.torch_distributed is None:
        return None, problem(
            "conflict",
            "use_horovod: expected mpirun, horovodrun or srun to start the processes, got ngpu or dist_ keys, which belong to "
            "torch.distributed (mpirun -np N ..., or leave use_horovod out)",
        )
    others = [each.name for each in entries_of("torch_distributed")]
    origin = origins.get("torch_distributed", COMMAND_LINE)
    keys, problems = torch_distributed_of(reduce.torch_distributed or {}, others, sections, origin)
    if keys is not None and keys.sharded and reduce.reduce_type != "grad":
        problems += problem(
            "conflict",
            "torch_distributed.sharded: expected reduce_type 'grad', where all ranks apply the same update, got "
            f"{reduce.reduce_type!r}",
        )
    return keys, problems


def _step_schedule(sections: Sections, source: Source) -> tuple[StepSchedule | None, list[Problem]]:
    """How the learning rate changes from step to step; None: it stays the same."""
    keys, run = sections.get(ScheduleKeys), sections.get(RunKeys)
    if keys is None or run is None:
        return None, []
    return make_schedule(keys.learning_rate_schedule, run.num_epochs)


def _datasets(sections: Sections, source: Source) -> tuple[tuple[DatasetSpec, ...], list[Problem]]:
    """The datasets that are given, train first."""
    keys, reduce = sections.get(DataKeys), sections.get(ReduceKeys)
    if keys is None:
        return (), []
    from hvdtrain.data.sources import datasets_of  # here: `--help` lists the keys without numpy, which checking data needs

    specs, problems = datasets_of(keys)
    is_split_by_seed = specs and specs[0].is_known and reduce is not None and reduce.dataset_distribution == "random_seed_offset"
    if is_split_by_seed and specs[0].name == "train" and not is_random(specs[0].order):
        problems += problem(
            "conflict",
            "horovod_dataset_distribution: expected a random seq_ordering in train for 'random_seed_offset', got "
            f"{specs[0].order.seq_ordering!r} (every rank would train on the same batches)",
        )
    return specs, problems + _remote_problems(sections, specs) + _impossible_measures(sections, source, specs)


def _remote_problems(sections: Sections, specs: Iterable[DatasetSpec]) -> list[Problem]:
    """Problems with what reading remote data files needs: packages, and a folder for local copies."""
    urls: dict[str, list[str]] = {}
    for part in [part for spec in specs for part in spec.all()]:
        if remote := list(filter(is_remote, part.files)):
            urls[part.name] = remote
    problems = [problem for name, some in urls.items() for problem in package_problems(name, some)]
    copies = sections.get(CopyKeys)
    if urls and copies is not None and copies.cache_dir is None:
        name, some = next(iter(urls.items()))
        problems += problem(
            "missing",
            f"cache_dir: expected a folder on a local disk for copies of the remote files of {name}, such as "
            f"{RemoteFile(some[0])}, got None",
        )
    return problems


def _impossible_measures(sections: Sections, source: Source, specs: tuple[DatasetSpec, ...]) -> list[Problem]:
    """Problems with keys that name a score of a dataset that is not given. The names of losses are only known after an epoch."""
    run, ending, newbob = sections.get(RunKeys), sections.get(EarlyStoppingKeys), sections.get(NewbobKeys)
    saving = sections.get(SavingKeys)
    if run is None or run.task not in ("train", "dry_run", "find_batch_size") or not specs:
        return []
    measures: dict[str, str | list[str] | None] = {
        "early_stopping_measure": None if ending is None else ending.early_stopping_measure,
        "learning_rate_control_error_measure": None if newbob is None else newbob.learning_rate_control_error_measure,
    }
    if saving is not None and not saving.problems():
        measures |= average_measures(saving.average_checkpoints)
    possible = [f"{spec.name}_loss_" for spec in specs]
    return [
        Problem.of(
            "unknown-value",
            f"{key}: expected the score of a dataset, {' or '.join(f'{start}NAME' for start in possible)}, got "
            f"{' or '.join(map(repr, wanted_of(measure)))} in {source.origins.get(key, 'the config')}",
        )
        for key, measure in measures.items()
        if measure and not any(name == FALLBACK or name.startswith(start) for name in wanted_of(measure) for start in possible)
    ]


def _forward_data(sections: Sections, source: Source) -> tuple[DatasetSpec | None, list[Problem]]:
    """The dataset to forward or search; None: the task is another one."""
    keys, run = sections.get(DataKeys), sections.get(RunKeys)
    if keys is None or run is None or run.task not in ("forward", "search"):
        return None, []
    from hvdtrain.data.sources import forward_dataset  # here, as in _datasets

    spec, problems = forward_dataset(keys, run.task)
    return spec, problems + ([] if spec is None else _remote_problems(sections, [spec]))


def _expected_data(sections: Sections, source: Source) -> tuple[Mapping[str, Any], list[Problem]]:
    """The entries of `extern_data`. Configs of another program follow its rules for problems and for types of numbers."""
    keys = sections.get(DataKeys)
    if keys is None or keys.extern_data is None:
        return {}, []
    from hvdtrain.data.expected import expected_of  # here, as in _datasets

    found, problems = expected_of(keys.extern_data, exact=not source.is_foreign)
    return found, [] if source.is_foreign else problems


def _function(sections: Sections, source: Source) -> tuple[Callable[[], Any] | None, list[Problem]]:
    """The config's function that the task names; None: the task is another one."""
    run = sections.get(RunKeys)
    if run is None or not run.task.startswith("config:"):
        return None, []
    function = source.values.get(run.task.removeprefix("config:"))
    if not callable(function):
        return None, problem(
            "unknown-value", f"task: expected config:NAME with the name of a function in the config, got {run.task!r}"
        )
    if wrong := signature_error(function, "**_"):
        return None, problem("wrong-signature", f"task: expected a function without parameters, got {wrong}")
    return function, []


def _outside_datasets(sections: Sections, source: Source) -> tuple[Mapping[str, tuple[Any, str]], list[Problem]]:
    names = (key.name for key in declared_keys(OrderKeys))
    return {name: (source.values[name], source.origins[name]) for name in names if name in source.values}, []


DERIVED: dict[str, Callable[[Sections, Source], tuple[Any, list[Problem]]]] = {
    "step_schedule": _step_schedule,
    "datasets": _datasets,
    "forward": _forward_data,
    "expected": _expected_data,
    "function": _function,
    "outside_datasets": _outside_datasets,
}
"""By attribute of Settings, the function that derives it from the sections; it returns the value and the problems."""
