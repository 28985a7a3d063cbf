"""The datasets of a config, and its functions that return them."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from os.path import basename
from typing import Any

from hvdtrain.data.keys import DataKeys, DatasetSpec
from hvdtrain.data.kinds import KINDS, adapted, adapted_classes
from hvdtrain.data.sources import check_dataset, class_name, is_function
from hvdtrain.errors import Problem, problem


def datasets_of(keys: DataKeys) -> tuple[tuple[DatasetSpec, ...], list[Problem]]:
    """The datasets that are given, train first, and the problems with them."""
    problems = []
    if keys.train is None:
        problems += problem("missing", "train: expected a dataset dict or HDF files, got None")
    named = {"train": keys.train, "dev": keys.dev, "eval": keys.eval}
    named = {name: value for name, value in named.items() if value is not None or name == "train"}
    if "train" in keys.eval_datasets:
        problems += problem(
            "conflict", "eval_datasets.train: expected a name other than train, whose scores are those of the training"
        )
    for name in ("dev", "eval"):
        if name in keys.eval_datasets and name in named and repr(named[name]) != repr(keys.eval_datasets[name]):
            problems += problem(
                "conflict", f"eval_datasets.{name}: expected either it or the key {name}, got both, and two datasets"
            )
    specs: dict[str, DatasetSpec] = {}
    for name, value in {**named, **keys.eval_datasets, **named}.items():  # in RETURNN's order
        if value is not None:
            ordering = keys.batching if name == "train" else "sorted"
            spec, more = check_dataset(name, value, {} if ordering is None else {"seq_ordering": ordering})
            problems += more
            specs |= {} if spec is None else {name: spec}
    return tuple(specs.values()), problems


def forward_dataset(keys: DataKeys, task: str) -> tuple[DatasetSpec | None, list[Problem]]:
    """The dataset of the tasks forward and search, and the problems with it."""
    search_data = keys.search_data if task == "search" else None
    for name, value in {"search_data": search_data, "forward_data": keys.forward_data, "eval": keys.eval}.items():
        if value is not None:
            return check_dataset(name, value, {"seq_ordering": "sorted_reverse"})
    return None, problem("missing", f"{task}_data: expected a dataset dict or HDF files for the task {task}, got None")


def parse(name: str, value: Any, defaults: Mapping[str, Any]) -> tuple[DatasetSpec | None, list[Problem]]:
    """Check a dataset of a config as `check_dataset` does, after calling the functions in it that return a dataset."""
    value, problems = call_functions(name, value)
    return (None, problems) if problems else check_dataset(name, value, defaults)


def call_functions(name: str, value: Any) -> tuple[Any, list[Problem]]:
    """A dataset of a config with each function replaced by the dataset that it returned; the problems with functions."""
    if is_function(value):
        try:
            returned = value()
        except Exception as error:
            got = f"{type(error).__name__}: {error}{_place(error)}"
            return value, problem("wrong-result", f"{name}: expected a function that returns a dataset, got {got}")
        if returned is None:
            return value, problem("wrong-result", f"{name}: expected a function that returns a dataset, got None")
        if isinstance(returned, Iterator):
            return {"class": value}, []
        value = {"class": returned} if is_function(returned) else returned
    if not isinstance(value, dict):
        return value, []
    understood, problems = adapted(name, value, {})
    if "class" in understood and class_name(understood) not in (*KINDS, *adapted_classes()):
        return value, problems

    def call(path: str, child: Any) -> Any:
        dataset, more = call_functions(f"{name}.{path}", child)
        problems.extend(more)
        if dataset is not child:  # RETURNN, for example, reads what this function returned, not all of the outer dataset
            dataset, more = adapted(f"{name}.{path}", dataset, {})
            problems.extend(more)
        return dataset

    value = dict(understood)
    if "dataset" in value:
        value["dataset"] = call("dataset", value["dataset"])
    several = value.get("datasets")
    if isinstance(several, dict):
        value["datasets"] = {child: call(f"datasets.{child}", inner) for child, inner in several.items()}
    elif isinstance(several, (list, tuple)):
        value["datasets"] = [call(f"datasets.{number}", inner) for number, inner in enumerate(several)]
    return value, problems


def call_data_functions(keys: DataKeys, names: Iterable[str]) -> tuple[DataKeys, list[Problem]]:
    """The keys with functions replaced by the datasets that they return; the problems with functions.

    Args:
        names: of the keys besides `eval_datasets`.
    """
    called = {name: call_functions(name, getattr(keys, name)) for name in names}
    eval_datasets = {
        name: called[name] if name in called else call_functions(name, value) for name, value in keys.eval_datasets.items()
    }
    problems = [problem for _, problems_here in {**eval_datasets, **called}.values() for problem in problems_here]
    values = {name: value for name, (value, _) in called.items()}
    return replace(keys, **values, eval_datasets={name: value for name, (value, _) in eval_datasets.items()}), problems


def _place(error: Exception) -> str:
    """Where an exception of a config's function was raised, for messages."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without that of the call itself
    return f" ({basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
