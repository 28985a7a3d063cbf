"""Lengths that nothing but reading shows: found by several processes, once, and kept in `lengths_dir`, as other facts are."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(lengths={"lengths_dir": f"{__name__}.find:FINDER"}, keys={"lengths": f"{__name__}.keys:LengthKeys"})
