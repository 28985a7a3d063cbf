"""Further models for the config's functions, such as the teacher of a distillation."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    learner_extensions={"extra_models": f"{__name__}.models:with_extra_models"},
    keys={"extra_models": f"{__name__}.keys:ExtraModelKeys"},
)
