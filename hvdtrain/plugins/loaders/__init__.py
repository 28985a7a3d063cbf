"""DataLoaders of PyTorch as datasets: hvdtrain plans their batches."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(adapters={"DataLoader": f"{__name__}.loader:LOADERS"})
