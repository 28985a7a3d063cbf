"""The reducer 'param': ranks train alone, and their parameters are averaged after N updates."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(reducers={"param": f"{__name__}.post_local:LocalUpdates"})
