"""The transport Horovod: the key `use_horovod`."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    transports={"horovod": f"{__name__}.communicator:connect"},
    launchers={"elastic_horovodrun": f"{__name__}.launcher:ElasticHorovodrun"},
)
