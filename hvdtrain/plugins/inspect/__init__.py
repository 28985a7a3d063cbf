"""Looking at a model: the task summary, layer by layer, what its steps cost, and the command export, for use without hvdtrain."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    tasks={"summary": f"{__name__}.summary:summarize"},
    commands={
        "export": ("write a trained model for use without hvdtrain: torch.export, ONNX, SavedModel", f"{__name__}.export"),
    },
    keys={"flops": f"{__name__}.keys:FlopKeys"},
    measures={"flops": f"{__name__}.flops:measure_flops"},
    reporters={"layers": f"{__name__}.layers:write_summary", "flops": f"{__name__}.flops:log_flops"},
)
