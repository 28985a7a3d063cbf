"""The keys that say which processes a job consists of and how they find each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hvdtrain.config.keys import Rule, key, not_negative, positive

port_number = Rule("a port from 1 to 65535", lambda value: 1 <= value <= 65535)

THREADS = (
    "several GPUs in one process mean threads that copy the model in every step and wait for Python's lock "
    "(torch.nn.DataParallel), which PyTorch itself advises against"
)


@dataclass(frozen=True, kw_only=True)
class LaunchKeys:
    """Processes that hvdtrain starts itself, and where they meet; the names are ESPnet2's"""

    ngpu: int | None = key(
        None,
        "start so many processes on this host and connect them with torch.distributed; 0: one process on the CPU",
        not_negative,
    )
    multiprocessing_distributed: bool | None = key(
        None, "True: each of several hosts (or of the processes that a launcher started) starts ngpu processes of its own"
    )
    dist_world_size: int | None = key(
        None, "how many processes there are; with ngpu processes on each host: how many hosts", positive
    )
    dist_rank: int | None = key(
        None, "the number of this process, from 0; with ngpu processes on each host: of this host", not_negative
    )
    dist_master_addr: str | None = key(None, "the host of rank 0, which the others connect to")
    dist_master_port: int | None = key(None, "the port on which rank 0 listens", port_number)
    dist_init_method: str | None = key(
        None, "the same in one: 'tcp://HOST:PORT', or 'file:///PATH' on a disk that all hosts share"
    )
    dist_launcher: Literal["slurm", "mpi"] | None = key(None, "who is expected to have started the processes")

    data_parallel_backend: bool = key(False, "SpeechBrain's threads over several GPUs: refused, take ngpu instead")

    def problems(self) -> list[str]:
        """What is wrong between the keys."""
        found = []
        if self.data_parallel_backend:
            found.append(f"data_parallel_backend: expected False, got True: {THREADS} (python -m hvdtrain CONFIG ++ngpu 4)")
        if (self.dist_master_addr is None) != (self.dist_master_port is None):
            there, missing = ("addr", "port") if self.dist_master_port is None else ("port", "addr")
            found.append(f"dist_master_{missing}: expected with dist_master_{there}, got nothing")
        if self.dist_master_addr is not None and self.dist_init_method is not None:
            found.append("dist_init_method: expected either this or dist_master_addr and dist_master_port, got both")
        if self.multiprocessing_distributed is False and (self.ngpu or 0) > 1:
            found.append(
                f"multiprocessing_distributed: expected True with ngpu = {self.ngpu}, got False: {THREADS} "
                f"(python -m hvdtrain CONFIG ++ngpu {self.ngpu} starts a process for each)"
            )
        return found

    def rank_problems(self) -> list[str]:
        """What is wrong between rank and number of processes; once what torch_distributed says of them stands here, too."""
        found = []
        if self.dist_rank is not None and self.dist_world_size is None:
            found.append(f"dist_world_size: expected with dist_rank = {self.dist_rank}, got nothing")
        if None not in (self.dist_rank, self.dist_world_size) and self.dist_rank >= self.dist_world_size:  # type: ignore[operator]
            found.append(f"dist_rank: expected a number below dist_world_size, {self.dist_world_size}, got {self.dist_rank}")
        return found

    @property
    def init_method(self) -> str | None:
        """Where the processes meet, as far as these keys say it."""
        if self.dist_master_addr is not None:
            host = f"[{self.dist_master_addr}]" if ":" in self.dist_master_addr else self.dist_master_addr
            return f"tcp://{host}:{self.dist_master_port}"
        return self.dist_init_method

    @property
    def ask_for_torch(self) -> bool:
        """Whether these keys speak of several processes, which torch.distributed then connects."""
        by_hand = self.dist_rank is not None or self.dist_world_size is not None
        return (self.ngpu or 0) > 1 or by_hand or self.dist_launcher is not None


@dataclass(frozen=True, kw_only=True)
class TorchDistributedKeys:
    """Entries of the dict torch_distributed; those about learning together default to the horovod_* keys"""

    backend: str | None = key(
        None,
        "gloo or nccl; None: NCCL for tensors on GPUs, Gloo for those in memory (RETURNN's 'cpu:gloo,cuda:nccl')",
        Rule("'gloo', 'nccl' or 'cpu:gloo,cuda:nccl'", lambda value: value in ("gloo", "nccl", "cpu:gloo,cuda:nccl")),
    )
    init_method: str | None = key(
        None, "where the processes meet: 'env://', 'tcp://HOST:PORT', 'file:///PATH'; None: what the launcher says"
    )
    timeout_sec: float = key(1800.0, "seconds after which a collective that waits for another rank fails", positive)
    rank: int | None = key(None, "this process's number, where no launcher says it", not_negative)
    world_size: int | None = key(None, "how many processes there are, where no launcher says it", positive)
    sharded: bool = key(
        False, "divide the optimizer's state among the ranks, for models whose training does not fit (with reduce_type 'grad')"
    )
    reduce_type: Literal["grad", "param"] | None = key(None, "as horovod_reduce_type")
    avg_grad: bool | None = key(None, "as horovod_avg_grad")
    param_sync_step: int | None = key(None, "as horovod_param_sync_step", positive)
    param_sync_time_diff: float | None = key(None, "as horovod_param_sync_time_diff", positive)
    scale_lr: bool | Literal["divide", "multiply", "sqrt"] | None = key(None, "as horovod_scale_lr")
    dataset_distribution: Literal["shard", "random_seed_offset"] | None = key(None, "as horovod_dataset_distribution")
