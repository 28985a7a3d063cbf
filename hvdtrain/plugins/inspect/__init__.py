"""Looking at a model: the task summary, layer by layer, and the command export, for use without hvdtrain."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    tasks={"summary": f"{__name__}.summary:summarize"},
    commands={
        "export": ("write a trained model for use without hvdtrain: torch.export, ONNX, SavedModel", f"{__name__}.export"),
    },
)
