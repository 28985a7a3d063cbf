"""In what form gradients, and changes of parameters, travel between the ranks: by the value of the key `horovod_compression`.

A new type of 16 bits is a line in the table, if the transports can send it. Whatever else makes messages smaller is a file with a
class derived from `Wire`, and a line.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdtrain.config.keys import Section, key, one_of, positive

if TYPE_CHECKING:
    from hvdtrain.comm.base import Communicator, Narrow, Op, Tensor
    from hvdtrain.learner.base import ModelState


@dataclass(frozen=True)
class Compression:
    """One way to make messages smaller.

    Attributes:
        narrow: a type of 16 bits for them; None: `wire` makes them.
        wire: the module and the class of a wire for gradients, made from a communicator and a rank; imported when it is used.
        over_horovod: whether Horovod can send it.
        gain: changes of parameters are multiplied by this before they are sent, and divided by it afterwards; it is a power of
            two. None: they are sent as they are.
        needs_scale: gradients may be too large or too small for the type, so that a scale of the loss has to find their range.
    """

    narrow: Narrow | None
    over_horovod: bool
    wire: tuple[str, str] | None = None
    gain: float | None = None
    needs_scale: bool = False


COMPRESSIONS = {
    # Averages of up to 64 fit into float16 with this gain. On 2 ranks, changes of 1e-6 still have all of its 11 bits.
    "fp16": Compression("float16", over_horovod=True, gain=2.0**10, needs_scale=True),
    "bf16": Compression("bfloat16", over_horovod=False),
    "powersgd": Compression(None, over_horovod=True, wire=("hvdtrain.learner.torch.power_sgd", "PowerSGD")),
}
"""By the value of the key `horovod_compression`."""


@dataclass(frozen=True, kw_only=True)
class WireKeys(Section):
    """What is sent in how many bits."""

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


@dataclass(frozen=True)
class Sent:
    """The bytes of tensors in their own types."""

    float32: int
    others: int


class Wire:
    """Sends tensors to the other ranks to be added up, those of float32 in a narrow type if it has one.

    Counts are not changed, as they are float64 or integers.

    Args:
        narrow: the type; None: every tensor travels in its own.
        gain: a power of two that tensors are multiplied by on their way.

    Attributes:
        keeps: whether it keeps tensors from update to update, which differ between ranks.
    """

    keeps = False

    def __init__(self, comm: Communicator, narrow: Narrow | None = None, gain: float = 1.0) -> None:
        self._comm = comm
        self._gain = gain
        self.narrow: Narrow | None = None if comm.size == 1 else narrow

    @property
    def sent(self) -> int:
        """The bytes that were sent over the communicator."""
        return self._comm.sent

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
        return gain, self._comm.start(tensors, op, name=name, owners=owners, narrow=narrow)

    def finish(self, handle: Any) -> list[Tensor]:
        """As `Communicator.finish`."""
        gain, started = handle
        reduced = self._comm.finish(started)
        return reduced if gain == 1.0 else [tensor / gain for tensor in reduced]

    def gather_rows(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        """Collective. As `Communicator.gather_rows`."""
        return self._comm.gather_rows(tensors, name=name, narrow=self.narrow)

    def begin(self, state: ModelState) -> None:
        """Called before the first update of an epoch: find what is kept in the state, and drop what another wire has kept."""
        state.shared.clear()
        state.own.clear()

    def forget(self) -> None:
        """What is kept was that of another number of ranks."""

    def num_bytes(self, sent: Sent) -> int:
        """The bytes of tensors on the wire, if they are sent in a graph, where the communicator cannot count them."""
        return sent.float32 // (1 if self.narrow is None else 2) + sent.others

    def describe(self) -> str:
        """What to add to a reducer's line in the log."""
        return "" if self.narrow is None else f", sent in {self.narrow}"


def gradient_wire(comm: Communicator, keys: WireKeys) -> Wire:
    """The wire for gradients. They have no gain: the scale of the loss keeps them, and their sum, within the range of float16."""
    chosen = COMPRESSIONS.get(keys.compression or "")
    if chosen is None:
        return Wire(comm)
    if chosen.wire is None:
        return Wire(comm, chosen.narrow)
    module, name = chosen.wire
    wire: Wire = getattr(importlib.import_module(module), name)(comm, keys.compression_rank)
    return wire


def change_wire(comm: Communicator, keys: WireKeys) -> Wire:
    """The wire for changes of parameters, which are averaged. It has a type of 16 bits or not; with one, parameters themselves
    would lose what they learn: a step is often smaller than their rounding."""
    chosen = COMPRESSIONS.get(keys.compression or "")
    if chosen is None or comm.size == 1:
        return Wire(comm)
    ranks = 1 << (comm.size - 1).bit_length()  # the sum over the ranks, from which the average is made, has to fit, too
    return Wire(comm, chosen.narrow, 1.0 if chosen.gain is None else chosen.gain / ranks)
