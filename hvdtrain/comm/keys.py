"""The config keys for the processes of a job: how many there are, and how they connect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.config.absent import absent
from hvdtrain.config.check import build, unknown_options
from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key, not_negative, positive
from hvdtrain.errors import Problem, problem

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
        Rule("zero or a positive number up to 1024", lambda value: 0 <= value <= 1024),
    )
    max_restarts: int = key(
        0,
        "with ngpu: start all processes again from the newest checkpoint, up to N times, when one was killed by a signal "
        "or hung; an error is never repeated (docs/elastic.md)",
        not_negative,
    )
    min_ngpu: int | None = key(
        None,
        "with max_restarts: if they are killed again before a checkpoint was written, continue with one process fewer, down to N",
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

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        problems = []
        if (self.ask_for_torch or self.max_restarts) and (hint := absent("ngpu")):
            names = ("ngpu", "dist_world_size", "dist_rank", "dist_launcher", "max_restarts")
            name = next(name for name in names if getattr(self, name))
            problems += problem("unsupported", f"{name}: expected its default, got {getattr(self, name)!r}{hint}")
        if self.data_parallel_backend:
            problems += problem(
                "unsupported", f"data_parallel_backend: expected False, got True: {THREADS} (python -m hvdtrain CONFIG ++ngpu 4)"
            )
        if (self.dist_master_addr is None) != (self.dist_master_port is None):
            present, missing = ("addr", "port") if self.dist_master_port is None else ("port", "addr")
            problems += problem("missing", f"dist_master_{missing}: expected with dist_master_{present}, got nothing")
        if self.dist_master_addr is not None and self.dist_init_method is not None:
            problems += problem(
                "conflict",
                "dist_init_method: expected either dist_init_method or dist_master_addr and dist_master_port, got both",
            )
        if self.max_restarts and self.ngpu is None:
            problems += problem(
                "missing",
                "max_restarts: expected with ngpu, the number of processes that hvdtrain starts and watches, got no ngpu (one "
                "process: ++ngpu 1; torchrun has --max-restarts)",
            )
        if self.min_ngpu is not None and not self.max_restarts:
            problems += problem(
                "missing", f"min_ngpu: expected with max_restarts, got min_ngpu = {self.min_ngpu} and no restarts"
            )
        if self.min_ngpu is not None and self.min_ngpu > (self.ngpu or 1):
            problems += problem("conflict", f"min_ngpu: expected at most ngpu, {self.ngpu}, got {self.min_ngpu}")
        if self.multiprocessing_distributed is False and (self.ngpu or 0) > 1:
            problems += problem(
                "unsupported",
                f"multiprocessing_distributed: expected True with ngpu = {self.ngpu}, got False: {THREADS} "
                f"(python -m hvdtrain CONFIG ++ngpu {self.ngpu} starts one process per GPU)",
            )
        return problems

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
class TorchDistributedKeys(Section):
    """Entries of the dict torch_distributed, besides the other spellings of horovod_* keys"""

    backend: str | None = key(
        None,
        "gloo or nccl; None: NCCL for tensors on GPUs, Gloo for those in memory (also written 'cpu:gloo,cuda:nccl')",
        Rule("'gloo', 'nccl' or 'cpu:gloo,cuda:nccl'", lambda value: value in ("gloo", "nccl", "cpu:gloo,cuda:nccl")),
    )
    init_method: str | None = key(
        None, "the rendezvous of the processes: 'env://', 'tcp://HOST:PORT', 'file:///PATH'; None: from the launcher"
    )
    timeout_sec: float = key(1800.0, "seconds after which a collective that waits for another rank fails", positive)
    rank: int | None = key(None, "the rank of this process, if no launcher sets it", not_negative)
    world_size: int | None = key(None, "the number of processes, if no launcher sets it", positive)

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        """Also with the dist_* keys, which give some of the same values."""
        started = sections.get(LaunchKeys) or LaunchKeys()
        same = {
            "init_method": ("dist_init_method", self.init_method, started.init_method),
            "rank": ("dist_rank", self.rank, started.dist_rank),
            "world_size": ("dist_world_size", self.world_size, started.dist_world_size),
        }
        problems = [
            Problem.of("conflict", f"torch_distributed.{name}: expected the value of {key_name}, {value!r}, got {entry!r}")
            for name, (key_name, entry, value) in same.items()
            if value is not None and entry not in (None, value)
        ]
        rank = self.rank if started.dist_rank is None else started.dist_rank
        size = started.dist_world_size or self.world_size
        if rank is not None and size is None:
            problems += problem("missing", f"dist_world_size: expected with dist_rank = {rank}, got nothing")
        if rank is not None and size is not None and rank >= size:
            problems += problem("conflict", f"dist_rank: expected a number below dist_world_size, {size}, got {rank}")
        return problems


NOT_SUPPORTED = {
    "fsdp": "fully_shard needs the same calls on every rank; sharded = True distributes the optimizer's state (docs/parallel.md)",
}
"""Entries that a user may look for, with the reason why there are none."""


def torch_distributed_of(
    entries: dict[str, Any], spellings: Iterable[str], sections: Sections, origin: str
) -> tuple[TorchDistributedKeys | None, list[Problem]]:
    """Check the dict torch_distributed. Returns its own keys, or None, and the problems.

    Args:
        entries: the dict's entries.
        spellings: the entries that are spellings of other sections' keys.
        origin: where the dict was set, for messages.
    """
    where = "torch_distributed."
    keys, problems = build(TorchDistributedKeys, entries, where, dict.fromkeys(entries, origin))
    entry_names = [*spellings, *NOT_SUPPORTED]
    problems += unknown_options(where, entries, TorchDistributedKeys, "torch_distributed", entry_names)
    for name in entries:
        if name in NOT_SUPPORTED:
            problems += problem(
                "unsupported", f"{where}{name}: expected no such entry, got {entries[name]!r} ({NOT_SUPPORTED[name]})"
            )
    return keys, problems if keys is None else problems + keys.problems(sections)
