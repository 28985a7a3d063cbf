"""Keys at the top level of configs."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.config.keys import Rule, Section, key, positive


@dataclass(frozen=True, kw_only=True)
class EpochFileKeys(Section):
    """A file with the epochs, and a model."""

    epoch_file: str | None = key(
        None, "a file NAME.txt with a line for each epoch", Rule("NAME.txt", lambda x: x.endswith(".txt"))
    )
    linear_inputs: int | None = key(None, "the number of inputs of a linear model", positive)
