"""The key of a training that continues with other data."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.config.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class SameDataKeys(Section):
    """Whether a training continues with other data."""

    accept_changed_data: bool = key(
        False,
        "continue within an epoch although the train data has changed since the epoch began. Give it on the command line, once",
    )
