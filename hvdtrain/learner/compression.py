"""Compression of gradients and parameter changes sent to other ranks: the key `horovod_compression`.

A new 16-bit type is a line in the table, if the transports can send it. Any other compression is a subclass of
`GradientCompressor`, and an entry in a plug-in's table.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hvdtrain.config.keys import Section, declared_keys, key, one_of, positive
from hvdtrain.config.plugins import Registry

if TYPE_CHECKING:
    from hvdtrain.comm.base import Communicator, Narrow, Op, Tensor
    from hvdtrain.learner.model_state import ModelState


@dataclass(frozen=True)
class Compression:
    """One way to make messages smaller.

    Attributes:
        narrow: the 16-bit type of the messages; None: `compressor` makes them.
        compressor: the module and the class of a compressor, created from a communicator, and `bits` or the key compression_rank;
            imported on first use.
        bits: the number of bits of an element, if it is for changes of parameters; None: for gradients.
        over_horovod: whether Horovod can send it.
        gain: a power of two that parameter changes are multiplied by before sending and divided by afterwards. None: they are
            sent as they are.
        needs_scale: whether gradients can be out of the type's range, so that the loss has to be scaled.
    """

    narrow: Narrow | None
    over_horovod: bool
    compressor: tuple[str, str] | None = None
    bits: int | None = None
    gain: float | None = None
    needs_scale: bool = False


COMPRESSIONS: Registry[Compression] = Registry(
    "compressions",
    {
        # With this gain, averages of up to 64 fit into float16, and on 2 ranks changes of 1e-6 keep all 11 bits of precision.
        "fp16": Compression("float16", over_horovod=True, gain=2.0**10, needs_scale=True),
        "bf16": Compression("bfloat16", over_horovod=False),
    },
)
"""By the value of the key `horovod_compression`."""


@dataclass(frozen=True, kw_only=True)
class CompressionKeys(Section):
    """The size of messages."""

    compression: str | None = key(
        None,
        "send gradients, or with 'param' the changes of the parameters since the last sync, in 16 bits: 'fp16', or, with "
        "torch.distributed, 'bf16'; counts and integers stay exact. With PyTorch, 'powersgd' sends gradients as products of thin "
        "matrices, and 'int8', 'int4' and 'int2' send changes of the parameters in so many bits",
        one_of(COMPRESSIONS),
        names=("horovod_compression", "torch_distributed.compression"),
    )
    compression_rank: int = key(
        4,
        "powersgd: the number of columns of these matrices",
        positive,
        names=("horovod_compression_rank", "torch_distributed.compression_rank"),
    )

    only: ClassVar[tuple[str, ...]] = ()
    """The fields that mean nothing to another reducer, and conflict with it."""

    @property
    def updates_alone(self) -> bool:
        """Whether every rank makes all updates from its own gradients only, unless the reducer reduces gradients."""
        return True

    @property
    def starts_with_gradients(self) -> bool:
        """Whether gradients are reduced at first, and no more later."""
        return False

    @property
    def needs_groups(self) -> bool:
        """Whether some of the ranks exchange messages among themselves."""
        return False

    @property
    def sends_vary(self) -> bool:
        """Whether the messages of syncs differ in size."""
        return False

    @classmethod
    def changed_of(cls, keys: CompressionKeys) -> list[str]:
        """The fields of `only` that have another value than the default."""
        fields = [declared for declared in declared_keys(cls) if declared.field in cls.only]
        return [declared.field for declared in fields if getattr(keys, declared.field) != declared.default]

    def ignored_key_line(self, reduce_type: str) -> str:
        """The log line about a key that another key overrides; empty: there is none. No error, as published configs have both."""
        return ""


class GradientCompressor:
    """Reduces tensors over the ranks, sends float32 ones in a narrow type if there is one, and counts the bytes.

    Counts stay exact, as they are float64 or integers.

    Args:
        narrow: the type; None: every tensor is sent in its own type.
        gain: a power of two that tensors are multiplied by for sending.

    Attributes:
        is_stateful: whether it keeps tensors between updates that differ from rank to rank.
        joins_buckets: whether several buckets of gradients share a message, so that its sums depend on their order.
        prefixes: with which the names of these tensors in the state begin.
        sent: the bytes that this rank has sent.
    """

    is_stateful = False
    joins_buckets = False
    prefixes: tuple[str, ...] = ()

    def __init__(self, comm: Communicator, narrow: Narrow | None = None, gain: float = 1.0) -> None:
        self._comm = comm
        self._gain = gain
        self.narrow: Narrow | None = None if comm.size == 1 else narrow
        self.sent = 0
        self._must_forget = False
        self._shared: dict[str, list[Tensor]] = {}
        self._own: dict[str, list[Tensor]] = {}

    @property
    def needs_changes(self) -> bool:
        """Whether parameters lose too much precision, so that their changes since the last sync have to be sent instead."""
        return self.narrow is not None

    def start(
        self, tensors: Sequence[Tensor], op: Op, *, name: str, owners: Sequence[int] | None = None, exact: bool = False
    ) -> Any:
        """Collective. As `Communicator.start`. Counts bytes here, since the communicator is shared.

        Args:
            exact: send the tensors as they are.
        """
        gain, narrow = (1.0, None) if exact else (self._gain, self.narrow)
        if gain != 1.0:
            tensors = [tensor * gain for tensor in tensors]
        before = self._comm.sent
        handle = self._comm.start(tensors, op, name=name, owners=owners, narrow=narrow)
        self.sent += self._comm.sent - before
        return gain, handle

    def finish(self, handle: Any) -> list[Tensor]:
        """As `Communicator.finish`."""
        gain, started = handle
        reduced = self._comm.finish(started)
        return reduced if gain == 1.0 else [tensor / gain for tensor in reduced]

    def gather_rows(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        """Collective. As `Communicator.gather_rows`."""
        return self._comm.gather_rows(tensors, name=name, narrow=self.narrow)

    def begin(self, state: ModelState, kept_names: Collection[str] = ()) -> None:
        """Called before the first update of an epoch: take over this compressor's tensors in the state.

        Args:
            kept_names: the names of tensors that somebody else keeps there. All remaining ones are dropped.
        """
        for lists in (state.shared, state.own):
            for name in [name for name in lists if name not in kept_names]:
                if self._must_forget or not name.startswith(self.prefixes):
                    del lists[name]
        self._must_forget = False
        self._shared, self._own = state.shared, state.own

    def forget(self) -> None:
        """Discard the kept tensors at the next `begin`: they belong to a different number of ranks."""
        self._must_forget = True

    def count_graph_bytes(self, float32: int, other_bytes: int) -> None:
        """Count tensors sent inside a graph, which the communicator does not see.

        Args:
            float32: the bytes of tensors of this type.
            other_bytes: those of tensors of all other types.
        """
        if self._comm.size > 1:
            self.sent += float32 // (1 if self.narrow is None else 2) + other_bytes

    def describe(self) -> str:
        """The addition to the reducer's log line."""
        return "" if self.narrow is None else f", sent in {self.narrow}"


def gradient_compressor(comm: Communicator, keys: CompressionKeys) -> GradientCompressor:
    """The compressor of gradients. It needs no gain: the loss scale keeps their sum within the range of float16."""
    chosen = COMPRESSIONS.get(keys.compression or "")
    if chosen is None or chosen.bits is not None:  # with `horovod_param_start`, only later changes are sent in few bits
        return GradientCompressor(comm)
    return GradientCompressor(comm, chosen.narrow) if chosen.compressor is None else _open(chosen, comm, keys.compression_rank)


def change_compressor(comm: Communicator, keys: CompressionKeys) -> GradientCompressor:
    """The compressor of averaged parameter changes. The parameters themselves are never sent in 16 bits: an update is often
    smaller than their rounding error."""
    chosen = COMPRESSIONS.get(keys.compression or "")
    if chosen is None or comm.size == 1:
        return GradientCompressor(comm)
    if chosen.bits is not None:
        return _open(chosen, comm, chosen.bits)
    ranks = 1 << (comm.size - 1).bit_length()  # the sum over the ranks, before the division, has to fit as well
    return GradientCompressor(comm, chosen.narrow, 1.0 if chosen.gain is None else chosen.gain / ranks)


def _open(chosen: Compression, comm: Communicator, number: int) -> GradientCompressor:
    module, name = chosen.compressor or ("", "")
    compressor: GradientCompressor = getattr(importlib.import_module(module), name)(comm, number)
    return compressor
