"""Looking at a model: the task summary, layer by layer, what its steps cost, and the command export, for use without hvdtrain."""

from dataclasses import dataclass

from hvdtrain.config.keys import Section, key
from hvdtrain.config.plugins import Plugin


@dataclass(frozen=True, kw_only=True)
class FlopKeys(Section):
    """How much of what the devices can do is used."""

    count_flops: bool = key(
        False,
        "count the floating-point operations of a batch and measure the device's peak before training begins (about a second), "
        "and report the operations of each epoch and their share of the peak (docs/reports.md)",
        needs="torch",
        instead="--summary shows the layers; TensorFlow's profiler counts in graphs of known lengths only",
    )


PLUGIN = Plugin(
    tasks={"summary": f"{__name__}.summary:summarize"},
    commands={
        "export": ("write a trained model for use without hvdtrain: torch.export, ONNX, SavedModel", f"{__name__}.export"),
    },
    keys={"flops": FlopKeys},
    measures={"flops": f"{__name__}.flops:measure_flops"},
    reporters={"layers": f"{__name__}.layers:write_summary", "flops": f"{__name__}.flops:log_flops"},
)
