"""The keys of a run as a whole, and of what it trains and evaluates on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.config.keys import REQUIRED, Rule, key, not_negative, parsed_by, positive
from hvdtrain.data.order import is_order
from hvdtrain.data.sizes import parse_sizes


def _is_task(value: str) -> bool:
    return value in ("train", "dry_run", "eval", "forward", "search", "cleanup_old_models") or value.startswith("config:")


@dataclass(frozen=True, kw_only=True)
class RunKeys:
    """The run as a whole."""

    task: str = key(
        "train",
        "what to do: train; dry_run, as the option --dry-run; eval (dev, eval, eval_datasets); forward or search (forward_data, "
        "search_data); cleanup_old_models; or config:NAME, which calls the config's function NAME",
        Rule("one of train, dry_run, eval, forward, search, cleanup_old_models, config:NAME", _is_task),
    )
    backend: Literal["torch", "tensorflow"] = key("torch", "the framework of get_model and train_step")
    model: str = key(REQUIRED, "where checkpoints go: the beginning of their names, such as exp/g2p/model")
    num_epochs: int = key(5, "train up to this epoch", positive)
    random_seed: int = key(
        42, "for initial weights, dropout and the like (the order of sequences goes by the epoch)", not_negative
    )
    num_threads: int | None = key(
        None, "threads a rank computes with; None: OMP_NUM_THREADS, or the host's cores divided among its ranks", positive
    )
    startup_callback: Callable[..., None] | str | None = key(
        None, "function (**_) that every rank calls before the datasets are opened; hvdtrain.run_on_main in it prepares data once"
    )
    watchdog_timeout: float = key(1800.0, "end the job when a rank makes no progress for so many seconds", positive)


@dataclass(frozen=True, kw_only=True)
class DataKeys:
    """What is trained and evaluated on: dicts with a class, HDF files, or functions that return one of these."""

    train: Any = key(REQUIRED, "the training data: a dataset dict, or HDF files")
    batching: str | Callable[..., str] | None = key(
        None,
        "seq_ordering of train where its dict says none (RETURNN's older key)",
        Rule("an order as in seq_ordering", is_order),
    )
    dev: Any = key(None, "evaluated after every epoch; seq_ordering is sorted unless the dict says otherwise")
    eval: Any = key(None, "evaluated after every epoch, like dev")
    cache_size: int | str | list[int | str] = key(
        0,
        "memory in which a rank keeps what it read of train, dev, eval (one size or up to three): 0 none, '2G' a budget with "
        "K, M or G, -1 everything; memory-mapped files need none",
        Rule("sizes such as 0, '512M', -1, or up to three of them", parsed_by(parse_sizes)),
    )
    eval_datasets: dict[str, Any] = key({}, "further datasets by name, evaluated after every epoch")
    forward_data: Any = key(None, "task forward: the data; None: eval")
    search_data: Any = key(None, "task search: the data; None: forward_data, or eval")
