"""The command completion: answers the shell, which asks for commands, options and keys."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(commands={"completion": ("how to complete commands and keys in the shell", f"{__name__}.__main__")})
