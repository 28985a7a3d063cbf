"""A plan of many sequences is made by one rank of a host; the others map it into their memory."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(planners={"shared": f"{__name__}.planner:plan_shared"})
