"""The package without its own plug-ins: it trains, and what asks for one of them is refused by name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

from hvdtrain.config.absent import NAMES
from hvdtrain.config.plugins import Plugin, plugins

CONFIG = ROOT / "configs/smallest.py"

OWN = sorted(path.parent.name for path in (ROOT / "hvdtrain/plugins").glob("*/__init__.py"))

OF_THE_CORE = ("schedule/test_schedule.py", "data/plan/test_plan.py", "training/test_agreement.py", "data/test_batches.py")
"""Tests that take a second each."""

ASKING: dict[str, dict[str, list[str]]] = {
    "average": {"average_checkpoints: unknown key": ["++average_checkpoints", "{'best': 2}"]},
    "cleanup": {
        "cleanup_old_models: unknown key": ["++cleanup_old_models", "1"],
        "task: expected one of": ["++task", "cleanup_old_models"],
    },
    "local_disk": {"checkpoint_local: unknown key": ["++checkpoint_local", "/tmp"]},
    "preload": {"preload_from_files: unknown key": ["++preload_from_files", "{}"]},
    "cache": {"cache_size: unknown key": ["++cache_size", "1M"]},
    "chunks": {"chunking: unknown key": ["++chunking", "50:25"]},
    "combine": {"train.class: expected one of": ["++train", "{'class': 'MetaDataset'}"]},
    "copies": {
        "cache_dir: unknown key": ["++cache_dir", "a"],
        "train: expected paths on a disk": ["++train", "s3://bucket/a.hdf"],
    },
    "lengths": {"lengths_dir: unknown key": ["++lengths_dir", "a"]},
    "same_data": {"accept_changed_data: unknown key": ["++accept_changed_data", "1"]},
    "completion": {"completion: expected a config file": ["completion"]},
    "compute": {"split_on_oom: unknown key": ["++split_on_oom", "1"]},
    "compression": {"horovod_compression: expected 'fp16' or 'bf16'": ["++horovod_compression", "powersgd"]},
    "returnn": {
        "backend: expected 'torch'": ["++backend", "tensorflow-net-dict"],
        "train.class: expected one of": ["++train", "{'class': 'ReturnnDataset'}"],
        "network: unknown key": ["++network", "{'output': {'class': 'softmax'}}"],
    },
    "schedules": {
        "learning_rate_control: expected 'constant'": ["++learning_rate_control", "newbob"],
        "learning_rate_schedule: unknown key": ["++learning_rate_schedule", "cosine"],
    },
    "speech": {"train.class: expected one of": ["++train", "{'class': 'KaldiFolder'}"]},
    "epoch_scores": {"epoch_scores: unknown key": ["++epoch_scores", "{}"]},
    "extra_models": {"extra_models: unknown key": ["++extra_models", "{}"]},
    "forward": {"output_file: unknown key": ["++output_file", "a.hdf"]},
    "frozen_base": {"save_parameters: unknown key": ["++save_parameters", "trained"]},
    "inspect": {"task: expected one of": ["++task", "summary"], "count_flops: unknown key": ["++count_flops", "1"]},
    "epoch_keys": {"keys_of_epoch: unknown key": ["++keys_of_epoch", "module:name"]},
    "goodput": {"save_interval_minutes: expected a number": ["++save_interval_minutes", "auto"]},
    "local_ranks": {"ngpu: expected its default": ["++ngpu", "2"], "max_restarts: expected": ["++max_restarts", "1"]},
    "streams": {"train.class: expected one of": ["++train", "{'class': 'IterableDataset'}"]},
    "synthetic": {"train.class: expected one of": ["++train", "{'class': 'DummyDataset'}"]},
    "horovod": {"use_horovod: expected False": ["++use_horovod", "1"]},
    "param_average": {
        "horovod_reduce_type: expected 'grad'": ["++horovod_reduce_type", "param"],
        "horovod_param_outer: unknown key": ["++horovod_param_outer", "bmuf"],
        "torch_distributed.param_outer: unknown key": ["++torch_distributed", "{'param_outer': 'bmuf'}"],
    },
    "trace": {"profile_steps: unknown key": ["++profile_steps", "3"]},
    "sharded": {"torch_distributed.sharded: unknown key": ["++torch_distributed", "{'sharded': True}"]},
    "watchdog": {"watchdog_timeout: unknown key": ["++watchdog_timeout", "20"]},
    "remote": {"checkpoint_mirror: expected a path": ["++checkpoint_mirror", "s3://bucket/exp"]},
    "submit": {"submit: expected a config file": ["submit"]},
    "trial": {"task: expected one of": ["++task", "dry_run"], "predict_ranks: unknown key": ["++predict_ranks", "8"]},
    "tables": {"train.class: expected one of": ["++train", "{'class': 'TarDataset'}"]},
    "tensorflow": {"backend: expected 'torch'": ["++backend", "tensorflow"]},
    "trackers": {"trackers: unknown key": ["++trackers", "wandb"], "metrics_file: unknown key": ["++metrics_file", "a.prom"]},
}
"""By plug-in, the message about what only it does, and the arguments that ask for it."""


def run(package: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python with a copy of the package."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package.parent), str(ROOT / "tests")])}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=package.parent, env=environment, capture_output=True, text=True, timeout=300)


def copy_without(names: list[str], folder: Path) -> Path:
    """A copy of the package in which these plug-ins' folders are deleted."""
    package = folder / "hvdtrain"
    shutil.copytree(ROOT / "hvdtrain", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in names:
        shutil.rmtree(package / "plugins" / name)
    return package


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_without(OWN, tmp_path_factory.mktemp("core"))


def entries(plugin: Plugin) -> set[str]:
    """The names that a config or a command line can have."""
    kinds = (
        "backends",
        "transports",
        "rate_controls",
        "launchers",
        "reducers",
        "compressions",
        "tasks",
        "sources",
        "datasets",
        "steps",
        "commands",
        "templates",
        "names",
        "learner_extensions",
        "storages",
        "tensors",
        "mirrors",
        "accounts",
        "bars",
    )
    return {name for kind in kinds for name in getattr(plugin, kind)}


@pytest.mark.parametrize("name", NAMES)
def test_the_names_of_what_may_be_missing_are_those_of_the_plug_in(name: str) -> None:
    from hvdtrain.config.keys import declared_keys
    from hvdtrain.learner.reducers import REDUCERS, CompressionKeys
    from hvdtrain.settings import OF_PLUGINS

    plugin = plugins()[f"plug-in {name}"]
    sections = [OF_PLUGINS[section] for section in plugin.keys] + [REDUCERS[reducer].keys for reducer in plugin.reducers]
    keys = {key.name for section in sections for key in declared_keys(section)}
    keys -= {key.name for key in declared_keys(CompressionKeys)}
    assert set(NAMES[name].split()) - {"network"} == entries(plugin) | keys


def check_refusals(package: Path, name: str) -> None:
    for message, words in ASKING.get(name, {}).items():
        refused = run(package, "-m", "hvdtrain", *words, *([] if words == ["submit"] else [CONFIG]))
        assert refused.returncode == 2, refused.stdout
        assert message in refused.stderr
        assert f"hvdtrain's plug-in {name} has it, and is missing" in refused.stderr


def test_what_is_missing_is_refused_by_name(core: Path) -> None:
    assert run(core, "-m", "hvdtrain", "--help").returncode == 0
    check_refusals(core, "submit")


@pytest.mark.slow
def test_the_core_trains_alone_and_passes_its_tests(core: Path, tmp_path: Path) -> None:
    trained = run(core, "-m", "hvdtrain", CONFIG, "++model", tmp_path / "model", "++num_epochs", 1)
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "scores.jsonl").exists()
    files = [ROOT / "tests" / file for file in OF_THE_CORE]
    options = ["-p", "no:cacheprovider", "--rootdir", ROOT, "--basetemp", tmp_path / "tested"]
    tested = run(core, "-m", "pytest", *options, *files)
    assert tested.returncode == 0, tested.stdout
    for name in ASKING:
        check_refusals(core, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_each_plug_in_may_be_deleted(name: str, tmp_path: Path) -> None:
    package = copy_without([name], tmp_path)
    trained = run(package, "-m", "hvdtrain", CONFIG, "++model", tmp_path / "exp/model", "++num_epochs", 1)
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "exp/scores.jsonl").exists()
    assert run(package, "-m", "hvdtrain", "help", "all").returncode == 0
    for command in [word for plugin in plugins().values() if name in plugin.needs for word in plugin.commands]:
        shown = run(package, "-m", "hvdtrain", command, "--help")
        assert shown.returncode == 0 or f"expected hvdtrain's plug-in {name}" in shown.stderr, shown.stderr
        assert "Traceback" not in shown.stderr
