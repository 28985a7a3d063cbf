"""The key `checkpoint_local`."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.config.keys import Rule, Section, key
from hvdtrain.data.remote import is_remote


@dataclass(frozen=True, kw_only=True)
class LocalDiskKeys(Section):
    """Checkpoints on a local disk first."""

    checkpoint_local: str | None = key(
        None,
        "a folder on a local disk: rank 0 writes checkpoints there first, and copies them to the model's folder while training "
        "goes on; the next start continues from one that was not copied yet; None: checkpoints are written to the model's folder",
        Rule("a folder on a disk", lambda value: bool(value) and not is_remote(value)),
    )
