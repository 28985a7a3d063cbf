"""The key of the plug-in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class EspnetKeys(Section):
    """A model of ESPnet2, as it is (docs/espnet.md)."""

    espnet_model: Any = key(
        None,
        "a function that makes the model, whose forward returns loss, stats and weight; or a dict of it as 'model' and of the "
        "data keys of its 'inputs' by name, and the 'int_pad_value'",
    )
