"""Checks of what training on several ranks and hosts needs: `hvdtrain doctor`; and `hvdtrain build-horovod`."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    commands={
        "doctor": ("check packages, MPI, network, hosts, config and data before training", f"{__name__}.__main__"),
        "build-horovod": ("build and install Horovod for the installed frameworks", f"{__name__}.build_horovod"),
    },
    needs={"horovod": "ranks that no config connects", "hdf_tools": "the check of HDF files", "trial": "predictions of speed"},
)
