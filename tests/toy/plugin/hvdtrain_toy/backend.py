"""The entry of a framework: its code in a folder, the suffix of its checkpoints."""

from hvdtrain.learner.frameworks import Framework

ARRAYS = Framework("hvdtrain_toy.arrays", "arrays")
