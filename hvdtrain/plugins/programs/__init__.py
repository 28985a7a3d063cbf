"""hvdtrain for other programs: `hvdtrain.train(...)` and so on, in their process (`api.py`) or on ranks (`spawn.py`)."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    names={
        name: f"{__name__}.api:{name}" for name in ("Average", "Best", "Result", "evaluate", "forward", "load_model", "train")
    },
    reporters={"table": f"{__name__}.table:show_table"},
    needs={"forward": "hvdtrain.forward", "local_ranks": "ranks of a call"},
)
