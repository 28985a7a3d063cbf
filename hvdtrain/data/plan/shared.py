"""A plan that one rank of a host makes and the others map into their memory.

The plan of millions of sequences would take seconds of a core and gigabytes of memory if each of 8 ranks of a host made it. So
one rank puts it into the memory of a file without a name, and sends the descriptor to the others, which open it through /proc.
The system frees the memory when the last process that maps it has ended, in any way; nothing can be left behind, and the size
of /dev/shm does not matter. A rank that cannot open the file makes the plan itself.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy

from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.bounds import SEQUENCES_AT_ONCE
from hvdtrain.data.plan.chunks import Chunks
from hvdtrain.data.plan.costs import costs_of
from hvdtrain.data.plan.epoch import Plan, crc32, plan
from hvdtrain.data.plan.mix import Mix
from hvdtrain.data.plan.order_keys import OrderKeys, method_of, order_text, part_of, seed_of
from hvdtrain.data.types import Array

WORTHWHILE = 1_000_000
"""Plans of at least this many sequences are shared. Smaller ones take a fraction of a second and some megabytes."""

TOKEN_BYTES = 64
"""The file begins with a token of this length, followed by the bounds of the batches and the order."""


@dataclass(frozen=True)
class PlanInputs:
    """The arguments of `plan`."""

    lengths: Mapping[str, Array]
    order_keys: OrderKeys
    batch_keys: BatchKeys
    epoch: int
    subset: Array | None
    file_bounds: Array | None
    chunks: Chunks | None
    window: int | None = None
    mix: Mix | None = None
    lengths_of_order: Mapping[str, Array] | None = None
    max_batches: int | None = None

    @property
    def size(self) -> int:
        """The number of sequences, or of chunks."""
        return len(next(iter(self.lengths.values())) if self.chunks is None else self.chunks.sequences)

    def plan(self) -> Plan:
        """Raises: DataError."""
        return plan(
            self.lengths,
            self.order_keys,
            self.batch_keys,
            self.epoch,
            subset=self.subset,
            file_bounds=self.file_bounds,
            chunks=self.chunks,
            window=self.window,
            mix=self.mix,
            lengths_of_order=self.lengths_of_order,
            max_batches=self.max_batches,
        )

    def as_text(self) -> dict[str, str]:
        """By name, as text, the keys and other inputs that determine the plan. Raises: DataError."""
        order = self.order_keys
        batches = self.batch_keys
        limits = self.batch_keys.limits(self.epoch)
        inputs = {
            "seq_ordering": order_text(order, self.epoch),
            **{name: getattr(order, name) for name in ("partition_epoch", "partition_by", "repeat_epoch")},
            "the seed of the order": seed_of(order, self.epoch),
            "batch_size per rank": limits.batch_size,
            "max_seqs per rank": limits.max_seqs,
            **{
                name: getattr(batches, name) for name in ("packed_batch_size", "max_pad_size", "min_seq_length", "max_seq_length")
            },
            **{
                name: getattr(batches, name)
                for name in ("frame_batches", "shuffle_batches", "online_shuffle_batches", "balance_ranks")
            },
            **({"largest_batches_first": True} if batches.largest_batches_first else {}),
            **({} if self.max_batches is None else {"max_batches of all ranks": self.max_batches}),
            "window": self.window,
            "chunking": self.chunks and f"{len(self.chunks.sequences)} chunks in steps of {dict(self.chunks.steps)}",
            **({} if self.chunks is None or self.chunks.context is None else {"context_window": self.chunks.context}),
            "seq_list_filter_file": None if self.subset is None else f"{len(self.subset)} sequences",
            **({} if self.mix is None else {"the mix": self.mix.text()}),
            **({} if batches.batch_cost is None else {"batch_cost": f"costs with the checksum {crc32(self._costs())}"}),
            "the data": f"{len(next(iter(self.lengths.values())))} sequences, {_frames_text(self.lengths)}",
        }
        return {name: str(value) for name, value in inputs.items()}

    def _costs(self) -> Array:
        """The costs of sequences or chunks; empty if the config defines none. Raises: DataError."""
        costs = costs_of(self.batch_keys, self.lengths if self.chunks is None else self.chunks.lengths)
        return numpy.zeros(0) if costs is None else costs

    def checksum(self) -> int:
        """A checksum: the same on two ranks if they would make the same plan, and faster to compute. Raises: DataError."""
        order = self.order_keys
        batches = self.batch_keys
        epoch = self.epoch
        keys = (
            *(method_of(order, epoch), seed_of(order, epoch), part_of(order, epoch)),
            *(order.partition_epoch, order.partition_by, order.repeat_epoch),
            *(batches.limits(epoch), batches.min_seq_length, batches.max_seq_length),
            *(batches.shuffle_batches, batches.balance_ranks, batches.shuffle_window, list(self.lengths)),
            *(self.max_batches, self.window, batches.frame_batches, batches.largest_batches_first),
            None if self.mix is None else self.mix.text(),
        )
        checksum = crc32(numpy.frombuffer(repr(keys).encode(), dtype=numpy.uint8))
        chunks = [] if self.chunks is None else [self.chunks.first, *self.chunks.lengths.values()]
        for array in (
            *self.lengths.values(),
            *(self.lengths_of_order or {}).values(),
            self.subset,
            self.file_bounds,
            *chunks,
            self._costs(),
        ):
            checksum = crc32(numpy.zeros(0) if array is None else array, checksum)
        return checksum


def _frames_text(lengths: Mapping[str, Array]) -> str:
    return ", ".join(f"{column.sum(dtype=numpy.int64)} frames of {name!r}" for name, column in lengths.items())


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The differences between the inputs of two plans; '' if there are none or they are unknown.

    >>> differences({"ranks": "1", "window": "None"}, {"ranks": "2", "window": "None"})
    'ranks: 2, expected 1'
    """
    return "; ".join(f"{name}: {now[name]}, expected {value}" for name, value in before.items() if now.get(name, value) != value)


@dataclass(frozen=True)
class Offer:
    """Where the other ranks of a host find a plan.

    Attributes:
        host: as `this_host` returns it.
        process: the id of the process that made it.
        descriptor: of the file in that process.
        token: the beginning of the file, by which it is recognized.
        num_bounds: one more than there are batches.
        shape: of the order.
        dtype: of the order: int32, unless there are too many sequences for it.
        inputs: the checksum of the inputs of the plan.
        plan: that of the plan itself.
    """

    host: str
    process: int
    descriptor: int
    token: bytes
    num_bounds: int
    shape: tuple[int, ...]
    dtype: str
    inputs: int
    plan: int

    @property
    def num_bytes(self) -> int:
        return TOKEN_BYTES + 8 * self.num_bounds + numpy.dtype(self.dtype).itemsize * math.prod(self.shape)


@contextmanager
def offer_plan(plan: Plan, inputs: int) -> Iterator[Offer | None]:
    """Copy a plan to memory that other processes of this host can map during the `with` block; None: that is impossible."""
    token = secrets.token_bytes(TOKEN_BYTES)
    try:
        descriptor = _nameless_file()
    except OSError:
        yield None
        return
    dtype = "int32" if plan.order.max(initial=0) < 2**31 else "int64"
    blocks = (plan.order[i : i + SEQUENCES_AT_ONCE].astype(dtype) for i in range(0, len(plan.order), SEQUENCES_AT_ONCE))
    try:
        complete = all(_write(descriptor, block) for block in chain([numpy.frombuffer(token, numpy.uint8), plan.bounds], blocks))
        offer = Offer(
            this_host(), os.getpid(), descriptor, token, len(plan.bounds), plan.order.shape, dtype, inputs, plan.fingerprint
        )
        yield offer if complete else None
    finally:
        os.close(descriptor)


def _write(descriptor: int, values: Array) -> bool:
    """Append an array to a file; False if there is no room. Writing to a map instead would then end the process."""
    rest = values.reshape(-1).view(numpy.uint8)
    try:
        while len(rest):
            rest = rest[os.write(descriptor, rest.data) :]
    except OSError:
        os.ftruncate(descriptor, 0)
        return False
    return True


def map_plan(offer: Offer) -> Plan | None:
    """The plan of an offer, mapped into this process, with read-only arrays; None if it cannot be mapped."""
    if offer.host != this_host():
        return None
    try:  # if the number belongs to another file by now, opening it must neither block nor take over a terminal
        descriptor = os.open(f"/proc/{offer.process}/fd/{offer.descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_size != offer.num_bytes or file.read(TOKEN_BYTES) != offer.token:
            return None
        try:
            memory = mmap.mmap(descriptor, offer.num_bytes, access=mmap.ACCESS_READ)
        except OSError:
            return None
    bounds = numpy.frombuffer(memory, numpy.int64, offer.num_bounds, TOKEN_BYTES)
    order = numpy.frombuffer(memory, offer.dtype, math.prod(offer.shape), TOKEN_BYTES + bounds.nbytes)
    return Plan(order.reshape(offer.shape), bounds)


def this_host() -> str:
    """A text that is the same for two processes if they see each other under /proc: it identifies the boot of the kernel and the
    namespace of process ids."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"a process of {os.uname().nodename} without /proc: {os.getpid()}"


def _nameless_file() -> int:
    """The descriptor of a file that no folder lists. Raises: OSError."""
    try:
        return os.memfd_create("hvdtrain-plan")
    except (AttributeError, OSError):  # an old C library, or a container that does not permit it
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
