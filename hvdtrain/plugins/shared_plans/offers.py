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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy

from hvdtrain.data.plan.bounds import SEQUENCES_AT_ONCE
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.data.types import Array

TOKEN_BYTES = 64
"""The file begins with a token of this length, followed by the bounds of the batches and the order."""


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
    try:
        return os.memfd_create("hvdtrain-plan")
    except (AttributeError, OSError):  # an old C library, or a container that does not permit it
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
