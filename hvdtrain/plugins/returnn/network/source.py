"""What a config with a network of RETURNN passes to the learner. Imports neither RETURNN nor TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NetworkSource:
    """A config with a network, as the value of the key `get_model`.

    Attributes:
        values: the config's names as RETURNN's functions see them.
        texts: the text of each config file, by its path.
    """

    values: Mapping[str, Any]
    texts: Mapping[str, str]

    def __call__(self, *, epoch: int, step: int, device: str, **_: Any) -> Any:
        """The signature of `get_model`; the learner builds the network itself."""
        return self.values.get("network")


def no_train_step(*, model: Any, extern_data: Any, **_: Any) -> None:
    """The value of the key `train_step`: the network defines the losses."""
