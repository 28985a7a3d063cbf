"""A Brain of SpeechBrain trains as it is (`brain`)."""

from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import Section, key
from hvdtrain.config.plugins import Plugin


@dataclass(frozen=True, kw_only=True)
class BrainKeys(Section):
    """A Brain of SpeechBrain, as it is (docs/speechbrain.md)."""

    brain: Any = key(
        None,
        "a function that makes the Brain; or a dict of its 'class', 'hparams' (a hyperpyyaml file), 'overrides', 'run_opts' and "
        "'datasets' (a function of the hyperparameters)",
    )


PLUGIN = Plugin(
    keys={"brain": BrainKeys},
    configs={"brain": f"{__name__}.brain:keys_of"},
    templates={
        "speechbrain": ("a Brain of SpeechBrain with its hyperparameters", __name__, "pip install speechbrain hyperpyyaml")
    },
    needs={"other_trainer": "models", "loaders": "samplers"},
)
