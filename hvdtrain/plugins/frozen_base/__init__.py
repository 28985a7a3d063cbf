"""Models of which only the trained parameters are saved, such as adapters (`save_parameters`)."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    learner_extensions={"frozen_base": f"{__name__}.parameters:with_base"},
    keys={"frozen_base": f"{__name__}.keys:FrozenBaseKeys"},
)
