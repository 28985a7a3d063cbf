"""The keys of a run as a whole, and the table of tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os.path import basename
from typing import Any

from hvdtrain.config.keys import (
    REQUIRED,
    Rule,
    Section,
    key,
    not_negative,
    one_of,
    positive,
)
from hvdtrain.config.plugins import Registry
from hvdtrain.data.remote import is_remote
from hvdtrain.learner.frameworks import FRAMEWORKS

TASKS: Registry[Callable[[Any], Any]] = Registry(
    "tasks",
    {
        "train": "hvdtrain.run:train",
        "eval": "hvdtrain.tasks.tasks:evaluate_all",
    },
)
"""By value of the key `task`, the function that runs it with the `Settings`; imported when it is called."""


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
        Rule(
            "a path on a disk that ends in the beginning of names, such as exp/model (checkpoint_mirror copies to a URL)",
            lambda value: basename(value) not in ("", ".", "..") and not is_remote(value),
        ),
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
