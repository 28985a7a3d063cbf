"""How gradients, and changes of parameters, are compressed on their way to other ranks: by the key `horovod_compression`.

A new type of 16 bits is a line in the table, if the transports can send it. Any other compression is a file with a class derived
from `GradientCompressor`, and a line.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdtrain.config.keys import Section, key, one_of, positive

if TYPE_CHECKING:
    from hvdtrain.comm.base import Communicator, Narrow, Op, Tensor
    from hvdtrain.learner.model_state import ModelState


@dataclass(frozen=True)
class Compression:
    """One way to make messages smaller.

    Attributes:
        narrow: a type of 16 bits for them; None: `compressor` makes them.
        compressor: the module and the class of a compressor for gradients, made from a communicator and a rank; imported when it
            is used.
        over_horovod: whether Horovod can send it.
        gain: changes of parameters are multiplied by this before they are sent, and divided by it afterwards; it is a power of
            two. None: they are sent as they are.
        needs_scale: gradients may be too large or too small for the type, so that a scale of the loss has to find their range.
    """

    narrow: Narrow | None
    over_horovod: bool
    compressor: tuple[str, str] | None = None
    gain: float | None = None
    needs_scale: bool = False


COMPRESSIONS = {
    # Averages of up to 64 fit into float16 with this gain. On 2 ranks, changes of 1e-6 still have all of its 11 bits.
    "fp16": Compression("float16", over_horovod=True, gain=2.0**10, needs_scale=True),
    "bf16": Compression("bfloat16", over_horovod=False),
    "powersgd": Compression(None, over_horovod=True, compressor=("hvdtrain.learner.torch.power_sgd", "PowerSGD")),
}
"""By the value of the key `horovod_compression`."""


@dataclass(frozen=True, kw_only=True)
class CompressionKeys(Section):
    """The size of messages."""

    compression: str | None = key(
        None,
        "send gradients, or with 'param' the changes of the parameters since the last sync, in 16 bits: 'fp16', or, with "
        "torch.distributed, 'bf16'; counts and integers stay exact. 'powersgd', with PyTorch: send gradients as products of thin "
        "matrices",
        one_of(COMPRESSIONS),
        names=("horovod_compression", "torch_distributed.compression"),
    )
    compression_rank: int = key(
        4,
        "powersgd: the number of columns of these matrices",
        positive,
        names=("horovod_compression_rank", "torch_distributed.compression_rank"),
    )


class GradientCompressor:
    """Sends tensors to the other ranks to be added up, those of float32 in a narrow type if it has one, and counts the bytes.

    Counts are not changed, as they are float64 or integers.

    Args:
        narrow: the type; None: every tensor travels in its own.
        gain: a power of two that tensors are multiplied by on their way.

    Attributes:
        keeps: whether it keeps tensors from update to update, which differ between ranks.
        sent: the bytes that this rank has sent.
    """

    keeps = False

    def __init__(self, comm: Communicator, narrow: Narrow | None = None, gain: float = 1.0) -> None:
        self._comm = comm
        self._gain = gain
        self.narrow: Narrow | None = None if comm.size == 1 else narrow
        self.sent = 0

    def start(
        self, tensors: Sequence[Tensor], op: Op, *, name: str, owners: Sequence[int] | None = None, exact: bool = False
    ) -> Any:
        """Collective. As `Communicator.start`.

        Args:
            exact: send the tensors as they are.
        """
        gain, narrow = (1.0, None) if exact else (self._gain, self.narrow)
        if gain != 1.0:
            tensors = [tensor * gain for tensor in tensors]
        return gain, self._send(tensors, op, name=name, owners=owners, narrow=narrow)

    def finish(self, handle: Any) -> list[Tensor]:
        """As `Communicator.finish`."""
        gain, started = handle
        reduced = self._comm.finish(started)
        return reduced if gain == 1.0 else [tensor / gain for tensor in reduced]

    def gather_rows(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        """Collective. As `Communicator.gather_rows`."""
        return self._comm.gather_rows(tensors, name=name, narrow=self.narrow)

    def begin(self, state: ModelState) -> None:
        """Called before the first update of an epoch: find what this one keeps in the state, and drop what others have kept."""
        state.shared.clear()
        state.own.clear()

    def forget(self) -> None:
        """What is kept was that of another number of ranks."""

    def count_graph_bytes(self, float32: int, others: int) -> None:
        """Count tensors that a graph has sent, where the communicator cannot count them.

        Args:
            float32: the bytes of tensors of this type.
            others: the bytes of tensors of all other types.
        """
        if self._comm.size > 1:
            self.sent += float32 // (1 if self.narrow is None else 2) + others

    def describe(self) -> str:
        """What to add to a reducer's line in the log."""
        return "" if self.narrow is None else f", sent in {self.narrow}"

    def _send(
        self,
        tensors: Sequence[Tensor],
        op: Op,
        *,
        name: str,
        owners: Sequence[int] | None = None,
        narrow: Narrow | None = None,
    ) -> Any:
        """Collective. As `Communicator.start`. Counts the bytes here, as others send over the same communicator."""
        before = self._comm.sent
        handle = self._comm.start(tensors, op, name=name, owners=owners, narrow=narrow)
        self.sent += self._comm.sent - before
        return handle


def gradient_compressor(comm: Communicator, keys: CompressionKeys) -> GradientCompressor:
    """The compressor of gradients. It has no gain: the scale of the loss keeps their sum within the range of float16."""
    chosen = COMPRESSIONS.get(keys.compression or "")
    if chosen is None:
        return GradientCompressor(comm)
    if chosen.compressor is None:
        return GradientCompressor(comm, chosen.narrow)
    module, name = chosen.compressor
    compressor: GradientCompressor = getattr(importlib.import_module(module), name)(comm, keys.compression_rank)
    return compressor


def change_compressor(comm: Communicator, keys: CompressionKeys) -> GradientCompressor:
    """The compressor of changes of parameters, which are averaged. In 16 bits, parameters themselves would lose what they learn:
    a step is often smaller than their rounding."""
    chosen = COMPRESSIONS.get(keys.compression or "")
    if chosen is None or comm.size == 1:
        return GradientCompressor(comm)
    ranks = 1 << (comm.size - 1).bit_length()  # the sum over the ranks, from which the average is made, has to fit, too
    return GradientCompressor(comm, chosen.narrow, 1.0 if chosen.gain is None else chosen.gain / ranks)
