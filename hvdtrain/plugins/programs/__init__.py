"""hvdtrain for other programs: `hvdtrain.train(...)` and so on, in their process (`api.py`) or on ranks (`spawn.py`)."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    names={
        name: f"{__name__}.api:{name}" for name in ("Average", "Best", "Result", "evaluate", "forward", "load_model", "train")
    },
    needs={"forward": "hvdtrain.forward"},
)
