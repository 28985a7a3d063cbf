"""RETURNN: configs that are written for it, its networks for TensorFlow, and the datasets that only it reads.

`translate.py` rewrites a config before its keys are checked: `names.py` and `values.py` have RETURNN's names and values of keys,
`imports.py` watches what the config imports, and `steps.py` wraps its functions if it imports `returnn`. `network/` is the
framework of configs with `network`; `dataset.py` and `reading.py` read datasets, and `search_output.py` writes hypotheses.
"""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    backends={"tensorflow-net-dict": f"{__name__}.backend:NETWORKS"},
    adapters={"RETURNN": f"{__name__}.dataset_dicts:DICTS"},
    datasets={"NextGenHDFDataset": f"{__name__}.keys:NextGenHDFDatasetKeys"},
    sources={"ReturnnDataset": f"{__name__}.dataset:ReturnnDataset"},
    checkpoint_hooks={"best_start": f"{__name__}.best_start:best_start_of"},
    callbacks={"epoch_functions": f"{__name__}.epoch_functions:epoch_functions_of"},
    writers={"search": f"{__name__}.search_output:search_writer"},
    keys={
        "search": f"{__name__}.keys:SearchKeys",
        "last_best": f"{__name__}.last_best:LastBestKeys",
        "epoch_functions": f"{__name__}.keys:EpochFunctionKeys",
    },
    templates={
        "returnn": (
            "PyTorch, in RETURNN's style; needs the package returnn",
            __name__,
            "pip install returnn dm-tree rapidfuzz soundfile",
        )
    },
    translations={"returnn": f"{__name__}.translate:RETURNN"},
    needs={
        "forward": "the task search",
        "epoch_keys": "the networks of epochs",
        "tensorflow": "networks",
        "streams": "the datasets that RETURNN reads",
    },
)
