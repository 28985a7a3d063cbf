"""TensorFlow in the table of frameworks."""

from hvdtrain.learner.frameworks import Framework

TENSORFLOW = Framework(
    "hvdtrain.plugins.tensorflow", "npz", ("tensorflow", "tensorflow-cpu", "keras"), has_prepare=True, header="tf"
)
