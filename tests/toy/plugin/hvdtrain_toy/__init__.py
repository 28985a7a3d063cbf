"""A plug-in with one of each kind."""

from hvdtrain import Plugin

PLUGIN = Plugin(
    datasets={"LinearDataset": "hvdtrain_toy.dataset:LinearDatasetKeys"},
    sources={"Ramp": "hvdtrain_toy.source:Ramp"},
    backends={"arrays": "hvdtrain_toy.backend:ARRAYS"},
    reducers={"epoch": "hvdtrain_toy.reducer:EpochAverage"},
    schedulers={"queue": "hvdtrain_toy.scheduler:QUEUE"},
    tasks={"count_frames": "hvdtrain_toy.task:count_frames"},
    commands={"greet": ("print a greeting", "hvdtrain_toy.command")},
    trackers={"list": "hvdtrain_toy.reporting:Lines"},
    reporters={"epoch file": "hvdtrain_toy.reporting:epoch_file"},
    keys={"epoch file": "hvdtrain_toy.keys:EpochFileKeys"},
    configs={"linear_inputs": "hvdtrain_toy.linear:keys_of"},
    translations={"program": "hvdtrain_toy.program:PROGRAM"},
)
