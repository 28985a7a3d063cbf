"""Job scripts for schedulers, Kubernetes and plain mpirun: `hvdtrain submit`."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    commands={"submit": ("write or submit a job script for a scheduler, Kubernetes or plain mpirun", f"{__name__}.__main__")}
)
