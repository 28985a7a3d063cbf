"""Means of checkpoints: those that a training makes at its end (key `average_checkpoints`), sums over updates
(`running_average`), and the command average.
"""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    commands={"average": ("write the mean of several checkpoints of a training", f"{__name__}.__main__")},
    checkpoint_hooks={"averages": f"{__name__}.final:averages_of", "running": f"{__name__}.running:sums_of"},
    final_models={"averages": f"{__name__}.final:make_averages"},
    keys={"averages": f"{__name__}.keys:AverageKeys"},
)
