"""Models of ESPnet2 train as they are: those whose forward returns a loss, statistics and their weight (`espnet_model`)."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    keys={"espnet_model": f"{__name__}.keys:EspnetKeys"},
    configs={"espnet_model": f"{__name__}.model:keys_of"},
    templates={"espnet": ("a model of ESPnet2, whose forward returns loss, stats and weight", __name__, "pip install espnet")},
    needs={"other_trainer": "models"},
)
