"""The config keys for the processes of a job: how many there are, and how they connect."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from hvdtrain.config.check import build, unknown_options
from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key, not_negative, positive

port_number = Rule("a port from 1 to 65535", lambda value: 1 <= value <= 65535)

THREADS = (
    "torch.nn.DataParallel, with several GPUs in one process, copies the model in every step and its threads wait for "
    "Python's GIL; PyTorch itself advises against it"
)


@dataclass(frozen=True, kw_only=True)
class LaunchKeys(Section):
    """Processes that hvdtrain starts itself, and how they connect; the names are ESPnet2's"""

    ngpu: int | None = key(
        None,
        "start N processes on this host and connect them with torch.distributed; 0: one process on the CPU",
        not_negative,
    )
    max_restarts: int = key(
        0,
        "with ngpu: start all processes again from the newest checkpoint, up to N times, when one was killed by a signal "
        "or hung; an error is never repeated (docs/elastic.md)",
        not_negative,
    )
    min_ngpu: int | None = key(
        None,
        "with max_restarts: where they are killed again before a checkpoint was written, go on with one process fewer, down to N",
        positive,
    )
    multiprocessing_distributed: bool | None = key(
        None, "True: each host (or each process that a launcher started) starts ngpu processes"
    )
    dist_world_size: int | None = key(
        None, "the number of processes; with ngpu processes on each host: the number of hosts", positive
    )
    dist_rank: int | None = key(
        None, "the rank of this process, from 0; with ngpu processes on each host: the rank of this host", not_negative
    )
    dist_master_addr: str | None = key(None, "the host of rank 0, to which the other ranks connect")
    dist_master_port: int | None = key(None, "the port on which rank 0 listens", port_number)
    dist_init_method: str | None = key(
        None, "both in one value: 'tcp://HOST:PORT', or 'file:///PATH' on a disk that all hosts share"
    )
    dist_launcher: Literal["slurm", "mpi"] | None = key(None, "the launcher that has to have started the processes")

    data_parallel_backend: bool = key(False, "SpeechBrain's threads over several GPUs: not supported, use ngpu instead")

    def problems(self, others: Sections = ALONE) -> list[str]:
        found = []
        if self.data_parallel_backend:
            found.append(f"data_parallel_backend: expected False, got True: {THREADS} (python -m hvdtrain CONFIG ++ngpu 4)")
        if (self.dist_master_addr is None) != (self.dist_master_port is None):
            given, missing = ("addr", "port") if self.dist_master_port is None else ("port", "addr")
            found.append(f"dist_master_{missing}: expected with dist_master_{given}, got nothing")
        if self.dist_master_addr is not None and self.dist_init_method is not None:
            found.append("dist_init_method: expected either dist_init_method or dist_master_addr and dist_master_port, got both")
        if self.max_restarts and self.ngpu is None:
            found.append(
                "max_restarts: expected with ngpu, the number of processes that hvdtrain starts and watches, got no ngpu (one "
                "process: ++ngpu 1; torchrun has --max-restarts)"
            )
        if self.min_ngpu is not None and not self.max_restarts:
            found.append(f"min_ngpu: expected with max_restarts, got min_ngpu = {self.min_ngpu} and no restarts")
        if self.min_ngpu is not None and self.min_ngpu > (self.ngpu or 1):
            found.append(f"min_ngpu: expected at most ngpu, {self.ngpu}, got {self.min_ngpu}")
        if self.multiprocessing_distributed is False and (self.ngpu or 0) > 1:
            found.append(
                f"multiprocessing_distributed: expected True with ngpu = {self.ngpu}, got False: {THREADS} "
                f"(python -m hvdtrain CONFIG ++ngpu {self.ngpu} starts one process per GPU)"
            )
        return found

    def rank_problems(self) -> list[str]:
        """Problems with rank and world size. Call this when the entries of torch_distributed have been merged in."""
        found = []
        if self.dist_rank is not None and self.dist_world_size is None:
            found.append(f"dist_world_size: expected with dist_rank = {self.dist_rank}, got nothing")
        if None not in (self.dist_rank, self.dist_world_size) and self.dist_rank >= self.dist_world_size:  # type: ignore[operator]
            found.append(f"dist_rank: expected a number below dist_world_size, {self.dist_world_size}, got {self.dist_rank}")
        return found

    @property
    def init_method(self) -> str | None:
        """The rendezvous address from these keys, if they give one."""
        if self.dist_master_addr is not None:
            host = f"[{self.dist_master_addr}]" if ":" in self.dist_master_addr else self.dist_master_addr
            return f"tcp://{host}:{self.dist_master_port}"
        return self.dist_init_method

    @property
    def ask_for_torch(self) -> bool:
        """Whether these keys ask for several processes, which torch.distributed then connects."""
        by_hand = self.dist_rank is not None or self.dist_world_size is not None
        return (self.ngpu or 0) > 1 or by_hand or self.dist_launcher is not None


@dataclass(frozen=True, kw_only=True)
class TorchDistributedKeys:
    """Entries of the dict torch_distributed; those about synchronization default to the horovod_* keys"""

    backend: str | None = key(
        None,
        "gloo or nccl; None: NCCL for tensors on GPUs, Gloo for those in memory (RETURNN's 'cpu:gloo,cuda:nccl')",
        Rule("'gloo', 'nccl' or 'cpu:gloo,cuda:nccl'", lambda value: value in ("gloo", "nccl", "cpu:gloo,cuda:nccl")),
    )
    init_method: str | None = key(
        None, "the rendezvous of the processes: 'env://', 'tcp://HOST:PORT', 'file:///PATH'; None: from the launcher"
    )
    timeout_sec: float = key(1800.0, "seconds after which a collective that waits for another rank fails", positive)
    rank: int | None = key(None, "the rank of this process, if no launcher sets it", not_negative)
    world_size: int | None = key(None, "the number of processes, if no launcher sets it", positive)
    sharded: bool = key(
        False, "shard the optimizer state over the ranks, for models that do not fit otherwise (with reduce_type 'grad')"
    )
    reduce_type: str | None = key(None, "as horovod_reduce_type")
    avg_grad: bool | None = key(None, "as horovod_avg_grad")
    param_sync_step: int | None = key(None, "as horovod_param_sync_step", positive)
    param_sync_time_diff: float | None = key(None, "as horovod_param_sync_time_diff", positive)
    compression: str | None = key(None, "as horovod_compression")
    compression_rank: int | None = key(None, "as horovod_compression_rank", positive)
    param_sync_rule: dict[str, Any] | str | None = key(None, "as horovod_param_sync_rule")
    param_sync_delay: int | None = key(None, "as horovod_param_sync_delay", not_negative)
    param_sync_parts: int | None = key(None, "as horovod_param_sync_parts", positive)
    param_outer: dict[str, Any] | str | None = key(None, "as horovod_param_outer")
    param_start: int | None = key(None, "as horovod_param_start", not_negative)
    scale_lr: bool | Literal["divide", "multiply", "sqrt"] | None = key(None, "as horovod_scale_lr")
    dataset_distribution: Literal["shard", "random_seed_offset"] | None = key(None, "as horovod_dataset_distribution")


NOT_NEEDED = {
    "class": "gradients are reduced without a wrapper around the model",
    "options": "gradients are reduced without a wrapper around the model",
    "sync_on_cpu": "backend 'gloo' averages on the CPU",
    "sync": "set reduce_type, param_sync_step and what belongs to them",
    "sync_optimizer_state": "every rank keeps the state of its own optimizer",
    "sync_at_epoch_end": "the ranks always have the same parameters at the end of an epoch",
    "sync_complete_frac": "every rank knows how many steps an epoch has",
}
"""Entries of RETURNN's torch_distributed that have no meaning here."""

NOT_SUPPORTED = {
    "fsdp": "fully_shard needs the same calls on every rank; sharded = True distributes the optimizer's state (docs/parallel.md)",
}
"""Entries that a user may look for, with the reason why there are none."""

OF_THE_WRAPPER = (
    "find_unused_parameters", "static_graph", "bucket_cap_mb", "gradient_as_bucket_view", "broadcast_buffers", "check_reduction",
)  # fmt: skip
"""Arguments of torch's DistributedDataParallel in the entry `options` that do not change gradients: there is no wrapper to take
them."""


def merged(
    entries: dict[str, Any], started: LaunchKeys, origin: str
) -> tuple[TorchDistributedKeys | None, LaunchKeys, list[str]]:
    """Check the dict torch_distributed and merge it with the dist_* keys, which give some of the same values.

    Args:
        entries: the dict's entries.
        started: the dist_* keys.
        origin: where the dict was set, for messages.

    Returns:
        The checked entries (None if they have problems) and the dist_* keys, each completed from the other, and the problems.
    """
    where = "torch_distributed."
    options = entries.get("options")
    if isinstance(options, dict) and all(name in OF_THE_WRAPPER for name in options):
        entries = {name: value for name, value in entries.items() if name != "options"}
    keys, problems = build(TorchDistributedKeys, entries, where, dict.fromkeys(entries, origin))
    problems += unknown_options(where, entries, TorchDistributedKeys, "torch_distributed", {**NOT_NEEDED, **NOT_SUPPORTED})
    for name in entries:
        if name in NOT_NEEDED:
            problems.append(f"{where}{name}: RETURNN's entry is not needed here ({NOT_NEEDED[name]})")
        if name in NOT_SUPPORTED:
            problems.append(f"{where}{name}: expected no such entry, got {entries[name]!r} ({NOT_SUPPORTED[name]})")
    if keys is None:
        return None, started, problems
    duplicates = {
        "init_method": ("dist_init_method", started.init_method),
        "rank": ("dist_rank", started.dist_rank),
        "world_size": ("dist_world_size", started.dist_world_size),
    }
    for name, (other, value) in duplicates.items():
        if value is not None and getattr(keys, name) not in (None, value):
            problems.append(f"{where}{name}: expected the value of {other}, {value!r}, got {getattr(keys, name)!r}")
    keys = replace(keys, init_method=keys.init_method or started.init_method)
    rank = started.dist_rank if keys.rank is None else keys.rank
    started = replace(started, dist_rank=rank, dist_world_size=keys.world_size or started.dist_world_size)
    return keys, started, problems + started.rank_problems()
