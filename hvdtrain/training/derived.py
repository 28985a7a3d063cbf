"""What follows from several sections of keys: the datasets, the schedule, and conflicts with the framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from hvdtrain.checkpoint.keys import SavingKeys
from hvdtrain.comm.keys import LaunchKeys, TorchDistributedKeys
from hvdtrain.config.absent import absent
from hvdtrain.config.check import unsupported_keys
from hvdtrain.config.convert import signature_error
from hvdtrain.config.keys import Section, Sections, declared_keys
from hvdtrain.config.source import Source
from hvdtrain.data.keys import DataKeys, DatasetSpec
from hvdtrain.data.plan.order_keys import OrderKeys, is_random
from hvdtrain.data.remote import COPIERS, is_remote
from hvdtrain.errors import Problem, problem
from hvdtrain.learner.compression import COMPRESSIONS
from hvdtrain.learner.frameworks import FRAMEWORKS, Feature, backends_with
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.model_format import SAFETENSORS
from hvdtrain.learner.reducers import ReduceKeys
from hvdtrain.schedule.measure import FALLBACK, wanted_of
from hvdtrain.training.run_keys import RunKeys


def resolve(
    built: Mapping[type, Any], torch_distributed: TorchDistributedKeys | None
) -> tuple[dict[type, Any], TorchDistributedKeys | None]:
    """The sections, with the values that follow from other sections filled in."""
    sections = Sections(built)
    result = {kind: section.resolved(sections) if isinstance(section, Section) else section for kind, section in built.items()}
    started = built[LaunchKeys]
    learner = built[LearnerKeys]
    if started is not None and learner is not None and started.ngpu == 0 and learner.device is None:
        result[LearnerKeys] = replace(learner, device="cpu")
    if torch_distributed is None:
        return result, None
    rank = started.dist_rank if torch_distributed.rank is None else torch_distributed.rank
    size = torch_distributed.world_size or started.dist_world_size
    result[LaunchKeys] = replace(started, dist_rank=rank, dist_world_size=size)
    return result, replace(torch_distributed, init_method=torch_distributed.init_method or started.init_method)


def framework_problems(built: Mapping[type, Any]) -> list[Problem]:
    """Problems with keys that the config's framework does not support."""
    learner, reduce, run, started = (built[section] for section in (LearnerKeys, ReduceKeys, RunKeys, LaunchKeys))
    if None in (learner, reduce, run, started):
        return []
    problems = unsupported_keys([section for section in built.values() if section is not None], run.backend)
    saving = built[SavingKeys]
    framework = FRAMEWORKS[run.backend]
    formats = (None, framework.model_suffix) if framework.model_suffix else (None, framework.suffix, SAFETENSORS)
    if saving is not None and saving.checkpoint_format not in formats:
        wanted = " or ".join(repr(name) for name in formats if name)
        problems += problem(
            "needs-backend",
            f"checkpoint_format: expected {wanted} with backend {run.backend!r}, got {saving.checkpoint_format!r}",
        )
    compression = COMPRESSIONS.get(reduce.compression or "")
    if compression is not None and compression.narrow is None and "computed compression" not in framework.features:
        wanted = _with_feature("computed compression")
        problems += problem(
            "needs-backend", f"horovod_compression: expected {wanted} for {reduce.compression!r}, got {run.backend!r}"
        )
    by_launcher = started.ask_for_torch and reduce.torch_distributed is None and not reduce.use_horovod
    if by_launcher and "torch.distributed" not in framework.features:
        wanted = _with_feature("torch.distributed")
        problems += problem(
            "needs-backend", f"torch_distributed: expected {wanted}, got {run.backend!r} (use_horovod connects it)"
        )
    return problems


def _with_feature(feature: Feature) -> str:
    return f"backend = {backends_with(feature)}"


def _datasets(sections: Sections, source: Source) -> tuple[tuple[DatasetSpec, ...], list[Problem]]:
    keys = sections.get(DataKeys)
    reduce = sections.get(ReduceKeys)
    if keys is None:
        return (), []
    from hvdtrain.data.config_datasets import datasets_of

    specs, problems = datasets_of(keys)
    is_split_by_seed = specs and specs[0].is_known and reduce is not None and reduce.dataset_distribution == "random_seed_offset"
    if is_split_by_seed and specs[0].name == "train" and not is_random(order := specs[0].order):
        got = repr(order.seq_ordering) if order.fixed_random_seed is None else f"fixed_random_seed = {order.fixed_random_seed}"
        problems += problem(
            "conflict",
            "horovod_dataset_distribution: expected a random seq_ordering in train for 'random_seed_offset', got "
            f"{got} (every rank would train on the same batches)",
        )
    return specs, problems + _remote_problems(sections, specs) + _impossible_measures(sections, source, specs)


def _remote_problems(sections: Sections, specs: Iterable[DatasetSpec]) -> list[Problem]:
    datasets = [dataset for spec in specs for dataset in spec.all()]
    urls = {dataset.name: remote for dataset in datasets if (remote := list(filter(is_remote, dataset.files)))}
    if not urls:
        return []
    if (copier := COPIERS.last) is not None:
        return copier.problems(sections, urls)
    return problem("missing-package", f"{next(iter(urls))}: expected paths on a disk, got a URL{absent('cache_dir')}")


def _impossible_measures(sections: Sections, source: Source, specs: tuple[DatasetSpec, ...]) -> list[Problem]:
    """Problems with keys that name a score of a dataset that is not given. The names of losses are only known after an epoch."""
    run = sections.get(RunKeys)
    if run is None or run.task not in ("train", "dry_run", "find_batch_size") or not specs:
        return []
    measures = {key: measure for section in sections for key, measure in section.measures.items()}
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
    keys = sections.get(DataKeys)
    run = sections.get(RunKeys)
    if keys is None or run is None or run.task not in ("forward", "search"):
        return None, []
    from hvdtrain.data.config_datasets import forward_dataset

    spec, problems = forward_dataset(keys, run.task)
    return spec, problems + ([] if spec is None else _remote_problems(sections, [spec]))


def _expected_data(sections: Sections, source: Source) -> tuple[Mapping[str, Any], list[Problem]]:
    """The entries of `extern_data`. Configs of another program follow its rules for problems and for types of numbers."""
    keys = sections.get(DataKeys)
    if keys is None or keys.extern_data is None:
        return {}, []
    from hvdtrain.data.expected import expected_of  # here, as in _datasets

    expected, problems = expected_of(keys.extern_data, exact=not source.is_foreign)
    return expected, [] if source.is_foreign else problems


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
    "datasets": _datasets,
    "forward": _forward_data,
    "expected": _expected_data,
    "function": _function,
    "outside_datasets": _outside_datasets,
}
"""By attribute of Settings, the function that derives it from the sections; it returns the value and the problems."""
