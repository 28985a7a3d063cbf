"""Batches without padding in models of PyTorch's: attention, convolutions and recurrent layers of their sequences."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(tensors={"Packed": f"{__name__}.data:PackedData"})
