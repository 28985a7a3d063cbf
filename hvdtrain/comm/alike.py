"""What all ranks must have alike, and when it is compared: otherwise they would compute something that no config asks for, or
wait for each other for ever."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hvdtrain.comm.base import Communicator
from hvdtrain.errors import ConfigError, problem

SHOWN = 5
"""The most differences that a message shows."""

Fact = Literal["keys", "keys_of_epoch", "model", "buffers", "extra_models", "trained", "plan", "data", "weights", "all_reduce"]


@dataclass(frozen=True)
class Comparison:
    """When a fact is compared.

    Attributes:
        when: in words.
        of: begins the names in messages, where the names do not stand for themselves.
        hint: the likely cause of a difference.
    """

    when: str
    of: str
    hint: str


COMPARED: Mapping[Fact, Comparison] = {
    "keys": Comparison(
        "as soon as the ranks are connected",
        "",
        "every rank reads the config: does it depend on hvdtrain.rank(), the host or the time?",
    ),
    "model": Comparison(
        "when it is built",
        "get_model: ",
        "every rank makes the model, and gets rank 0's values: does it iterate over a set, whose order is that of its process? "
        "An attribute that each rank has for itself begins with _",
    ),
    "buffers": Comparison(
        "before they are averaged",
        "get_model: ",
        "make a buffer with its final shape, or with persistent=False: each rank has its own then, which is not saved",
    ),
    "extra_models": Comparison(
        "when they are built", "extra_models: ", "every rank makes and loads it by itself: are the files the same on all hosts?"
    ),
    "trained": Comparison(
        "before the steps of an epoch, and after them",
        "whether it is trained, ",
        "does a callback or train_step change requires_grad, or trainable of a layer, by what this rank alone has?",
    ),
    "keys_of_epoch": Comparison(
        "before the epoch", "", "every rank gets them by itself: do they depend on hvdtrain.rank() or the host?"
    ),
    "plan": Comparison("when it is made, by a checksum", "", "does the config or the data depend on the rank or the host?"),
    "data": Comparison(
        "before the first epoch, some sequences",
        "",
        "every rank opens the data by itself: are the files the same on all hosts, and does the order or the number of a label "
        "come from a set, a shuffle without a seed or a listing of files?",
    ),
    "weights": Comparison(
        "before each save, and now and then after an update, by checksums, where all ranks make the same updates",
        "",
        "all ranks get the same gradients: does dynamic_learning_rate, a callback or train_step change the weights by what this "
        "rank alone has, such as its own loss?",
    ),
    "all_reduce": Comparison(
        "when a config calls it", "", "every rank has to call all_reduce equally often, in the same order, with the same shapes"
    ),
}
"""All that is compared by name and value."""

OWN_KEYS = frozenset(
    (
        # of the process and its host
        *("num_threads", "device", "watchdog_timeout", "cache_size", "cache_dir_size", "time_limit"),
        *("time_limit_margin", "ngpu", "max_restarts", "min_ngpu", "multiprocessing_distributed", "dist_world_size", "dist_rank"),
        *("dist_master_addr", "dist_master_port", "dist_init_method", "dist_launcher", "torch_distributed.init_method"),
        *("torch_distributed.rank", "torch_distributed.world_size", "torch_distributed.timeout_sec"),
        # of what each rank writes, or rank 0 alone
        *("log", "log_verbosity", "log_interval", "log_interval_steps", "log_color", "log_batch_size", "torch_log_memory_usage"),
        *("use_tensorboard", "tensorboard_histograms", "trackers", "metrics_file", "track_epoch", "learning_rate_file"),
        *("horovod_timeline", "trace_sequences", "callbacks", "epoch_start", "epoch_end"),
        # of data and batches: the plans made from them are compared
        *("train", "dev", "eval", "eval_datasets", "forward_data", "search_data", "extern_data", "batching"),
        *("batch_size", "batch_size_train", "batch_size_dev", "max_seqs", "max_seqs_train", "max_seqs_dev", "batch_size_total"),
        *("max_seqs_total", "packed_batch_size", "packed_batch_size_train", "packed_batch_size_dev", "max_pad_size"),
        *("batch_cost", "max_seq_length", "min_seq_length", "packed"),
        *("frame_batches", "shuffle_batches", "online_shuffle_batches", "largest_batches_first", "balance_ranks", "chunking"),
        *("min_chunk_size", "chunking_tail", "context_window"),
        # the spellings of their entries are keys of their own
        *("use_horovod", "torch_distributed"),
    )
)
"""Keys that may have another value on each rank. All others have to be the same on all ranks."""

OWN_FOLDERS = frozenset(("cache_dir", "checkpoint_local", "lengths_dir"))
"""Keys whose folder may be another one on each host, as long as all have one."""

OF_LOCAL_UPDATES = frozenset(
    (
        *("learning_rate", "learning_rates", "learning_rate_schedule", "dynamic_learning_rate", "learning_rate_ramp"),
        *("optimizer", "gradient_clip", "gradient_clip_global_norm", "gradient_noise", "random_seed"),
    )
)
"""Keys that may also differ where every rank updates alone (`ReduceKeys.updates_alone`)."""


def check_alike(comm: Communicator, fact: Fact, values: Mapping[str, str], of: str | None = None) -> None:
    """Collective. Compare every rank's values with those of rank 0.

    Args:
        values: by name, as text.
        of: begins the names in messages; None: as `COMPARED` says.

    Raises:
        ConfigError: on all ranks, with the names that differ and the first rank that differs.
    """
    from hashlib import sha256  # loads OpenSSL, a tenth of the time of --help, which needs the names above

    compared = COMPARED[fact]
    name = f"compare_{fact}"
    of = compared.of if of is None else of
    # Checksums first: the values of all ranks, such as the shapes of a thousand parameters, would fill the memory of each rank.
    checksum = sha256(repr(sorted(values.items())).encode()).digest()
    checksums = comm.gather(checksum, name=name)
    rank = next((rank for rank, theirs in enumerate(checksums) if theirs != checksums[0]), None)
    if rank is None:
        return
    by_rank = comm.gather(dict(values) if comm.rank in (0, rank) else {}, name=f"{name}.values")
    first = by_rank[0]
    theirs = by_rank[rank]
    names = [key for key in dict.fromkeys([*first, *theirs]) if first.get(key) != theirs.get(key)]
    names.sort(key=lambda key: key not in first or key not in theirs)  # what only one has often follows from the others
    problems = []
    for number, key in enumerate(names[:SHOWN], start=1):
        more = f", {len(names) - SHOWN} more differ" if len(names) > SHOWN else ""
        end = f"{more} ({compared.hint})" if number == len(names[:SHOWN]) else ""
        problems += problem(
            "rank-mismatch",
            f"{of}{key}: expected the same on all ranks, got {first.get(key, 'nothing')} on rank 0 and "
            f"{theirs.get(key, 'nothing')} on rank {rank}{end}",
        )
    raise ConfigError(problems).on_all_ranks()
