"""`returnn.forward_iface`: the base class of a config's forward_callback."""

from __future__ import annotations

from typing import Any


class ForwardCallbackIface:
    """What is done with the outputs of the task forward, sequence by sequence."""

    def init(self, *, model: Any) -> None:
        """Called first."""

    def process_seq(self, *, seq_tag: str, outputs: Any) -> None:
        """Called for every sequence; `outputs` is a TensorDict whose raw tensors are numpy arrays without padding."""

    def finish(self) -> None:
        """Called last."""
