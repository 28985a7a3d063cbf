"""Whether the data is the same as that of the checkpoint from which a training continues, and on all ranks."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(data_checks={"same data": f"{__name__}.checks:SAME_DATA"}, keys={"same_data": f"{__name__}.keys:SameDataKeys"})
