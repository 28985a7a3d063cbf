"""Progress bars on terminals and in notebooks."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(bars={"tqdm": f"{__name__}.drawn:BARS"})
