"""Where the seconds of a training went over all its starts, and how often checkpoints lose least (`save_interval_minutes`)."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(accounts={"goodput": f"{__name__}.open:open_goodput"})
