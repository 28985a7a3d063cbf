"""The settings of an epoch (the key `keys_of_epoch`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hvdtrain.config.check import did_you_mean
from hvdtrain.config.keys import declared_keys
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.errors import ConfigError, Problem, problem
from hvdtrain.learner.steps import AccumulationKeys
from hvdtrain.settings import DATASETS, OF_PLUGINS, Settings, all_keys, check, with_datasets

CHANGING = [section for section in OF_PLUGINS.values() if section.varies]

MAY_CHANGE = (
    *(each.name for section in (BatchKeys, AccumulationKeys, *CHANGING) for each in declared_keys(section)),
    *("learning_rate", *DATASETS, "eval_datasets"),
)
"""The keys that may have another value in an epoch."""


def settings_of_epoch(settings: Settings, keys: Mapping[str, Any], where: str) -> Settings:
    """The settings with other values of some keys in an epoch; those of datasets are opened again only if these keys are given.

    Args:
        where: the values come from, for messages.

    Raises:
        ConfigError: with all problems: keys that may not change, wrong values, conflicts with other keys.
    """
    names = [each.name for each in all_keys()]
    problems: list[Problem] = []
    for name in keys:
        if name in names and name not in MAY_CHANGE:
            problems += problem(
                "unsupported",
                f"{where}: {name}: it cannot change with the epoch (keys of batches, chunks and accumulation, learning_rate, "
                "train, dev, eval and eval_datasets can)",
            )
        elif name not in names:
            problems += problem("unknown-key", f"{where}: {name}: unknown key{did_you_mean(name, MAY_CHANGE)}")
    if problems:
        raise ConfigError(problems)
    source = settings.source
    origins = {**source.origins, **dict.fromkeys(keys, where)}
    datasets_given = {*DATASETS, "eval_datasets"} & keys.keys()
    try:
        checked = check(replace(source, values={**source.values, **keys}, origins=origins), names)
        checked = with_datasets(checked) if datasets_given else checked
    except ConfigError as error:  # problems of datasets and conflicts do not name the origin of a value
        raise ConfigError([each if where in str(each) else each.within(f"{where}: ") for each in error.problems]) from error
    datasets = settings.datasets
    if datasets_given:
        specs = {spec.name: spec for spec in checked.datasets}
        if list(specs) != (expected := [spec.name for spec in settings.datasets]):
            raise ConfigError.of(
                "wrong-result", f"{where}: expected the datasets {', '.join(expected)} in every epoch, got {', '.join(specs)}"
            )
        changed = {*keys, *(keys.get("eval_datasets") or {})}
        datasets = tuple(specs[spec.name] if spec.name in changed else spec for spec in settings.datasets)
    return replace(
        settings,
        batch=checked.batch,
        of_plugins=tuple(checked.of(type(section)) if section.varies else section for section in settings.of_plugins),
        accumulation=checked.accumulation,
        schedule=replace(settings.schedule, learning_rate=checked.schedule.learning_rate),
        data=checked.data,
        datasets=datasets,
    )


def value_of(settings: Settings, name: str) -> Any:
    """The value of a key."""
    [value] = [
        getattr(section, each.field)
        for kind, section in settings.sections.items()
        for each in declared_keys(kind)
        if each.name == name
    ]
    return value
