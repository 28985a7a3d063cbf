"""Models of ESPnet2 train as they are: those whose forward returns a loss, statistics and their weight (`espnet_model`)."""

from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import Section, key
from hvdtrain.config.plugins import Plugin


@dataclass(frozen=True, kw_only=True)
class EspnetKeys(Section):
    """A model of ESPnet2, as it is (docs/espnet.md)."""

    espnet_model: Any = key(
        None,
        "a function that makes the model, whose forward returns loss, stats and weight; or a dict of it as 'model' and of the "
        "data keys of its 'inputs' by name, and the 'int_pad_value'",
    )


PLUGIN = Plugin(
    keys={"espnet_model": EspnetKeys},
    configs={"espnet_model": f"{__name__}.model:keys_of"},
    templates={"espnet": ("a model of ESPnet2, whose forward returns loss, stats and weight", __name__, "pip install espnet")},
    needs={"other_trainer": "models"},
)
