"""`hvdtrain.all_reduce`: values of a config's functions, such as those of a metric, summed over all ranks."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(names={"all_reduce": f"{__name__}.values:reduce_values"})
