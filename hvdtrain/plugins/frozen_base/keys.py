"""The key `save_parameters`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hvdtrain.config.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class FrozenBaseKeys(Section):
    """Parameters that the model's file has."""

    save_parameters: Literal["all", "trained"] = key(
        "all",
        "which parameters the model's file has: all, or only the trained ones, such as adapters, with a hash of the frozen ones "
        "from get_model, which is checked on loading",
        needs="torch",
        instead="Keras saves layers by name: save those of the adapter in a callback",
    )
