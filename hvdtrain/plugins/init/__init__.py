"""The command init, and its configs to start from."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(commands={"init": ("write a commented config to start from", f"{__name__}.__main__")})
