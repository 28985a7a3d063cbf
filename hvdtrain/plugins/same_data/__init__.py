"""Whether the data is the same as that of the checkpoint from which a training continues, and on all ranks."""

from dataclasses import dataclass

from hvdtrain.config.keys import Section, key
from hvdtrain.config.plugins import Plugin


@dataclass(frozen=True, kw_only=True)
class SameDataKeys(Section):
    """Whether a training continues with other data."""

    accept_changed_data: bool = key(
        False,
        "continue within an epoch although the train data has changed since the epoch began. Give it on the command line, once",
    )


PLUGIN = Plugin(data_checks={"same data": f"{__name__}.checks:SAME_DATA"}, keys={"same_data": SameDataKeys})
