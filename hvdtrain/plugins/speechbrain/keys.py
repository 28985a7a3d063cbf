"""The key of the plug-in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class BrainKeys(Section):
    """A Brain of SpeechBrain, as it is (docs/speechbrain.md)."""

    brain: Any = key(
        None,
        "a function that makes the Brain; or a dict of its 'class', 'hparams' (a hyperpyyaml file), 'overrides', 'run_opts' and "
        "'datasets' (a function of the hyperparameters)",
    )
