"""Models of which only the trained parameters are saved, such as adapters (`save_parameters`)."""

from dataclasses import dataclass
from typing import Literal

from hvdtrain.config.keys import Section, key
from hvdtrain.config.plugins import Plugin


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


PLUGIN = Plugin(
    learner_extensions={"frozen_base": f"{__name__}.parameters:with_base"},
    keys={"frozen_base": FrozenBaseKeys},
)
