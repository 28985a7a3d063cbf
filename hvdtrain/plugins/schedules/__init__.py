"""Learning rates that follow from the epochs before (newbob), schedules of the steps, and the file `learning_rate_file`."""

from hvdtrain.config.plugins import Plugin

NEWBOB = ("newbob", "newbob_rel", "newbob_relative", "newbob_abs", "newbob_multi_epoch")

PLUGIN = Plugin(
    rate_controls=dict.fromkeys(NEWBOB, f"{__name__}.newbob:newbob_of"),
    rate_factors={"schedule": f"{__name__}.factor:factor_of"},
    checkpoint_hooks={"learning_rate_file": f"{__name__}.file:FormerEpochs"},
    reporters={"learning_rate_file": f"{__name__}.file:open_file"},
    keys={
        "newbob": f"{__name__}.keys:NewbobKeys",
        "schedule": f"{__name__}.keys:StepRateKeys",
        "learning_rate_file": f"{__name__}.keys:RateFileKeys",
    },
)
