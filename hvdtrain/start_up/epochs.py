"""What differs between the epochs of a training: nothing, what plug-ins say, or the number of ranks on which an epoch began."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from hvdtrain.checkpoint.progress import EpochProgress
from hvdtrain.comm.base import Communicator, together
from hvdtrain.config.absent import absent
from hvdtrain.config.plugins import Registry
from hvdtrain.data.feed import Feed
from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import Learner
from hvdtrain.report.starts import ranks_text
from hvdtrain.runtime import log
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.settings import Settings
from hvdtrain.start_up.data import with_keys
from hvdtrain.training.session import Epochs


@dataclass(frozen=True)
class BegunEpoch:
    """An epoch that began on another number of ranks. It keeps the batches that were made for them, so that each sequence is used
    once, although those of all ranks together are larger or smaller than `max_seqs_total` or `batch_size_total` says."""

    number: int
    ranks: int

    def line(self, settings: Settings, ranks: int) -> str:
        """The warning about its steps on now so many ranks; empty: its batches do not depend on the number of ranks."""
        began = f"epoch {self.number} began on {ranks_text(self.ranks)}"
        if settings.reduce.dataset_distribution != "shard":
            effect = "what the others had left is not trained" if ranks < self.ranks else "each new rank joins at their position"
            return f"horovod_dataset_distribution: {began}, each with an order of its own: {effect}"
        for name in ("max_seqs_total", "batch_size_total"):
            total = getattr(settings.batch, name)
            if isinstance(total, int):
                size = max(1, total // self.ranks)
                effect = f"until it ends, a step has {ranks * size} on {ranks_text(ranks)} instead of {total}"
                return f"{name}: {began} and keeps its batches of {size}: {effect}"
            if total is not None:
                return f"{name}: {began} and keeps its batches: until it ends, a step has {ranks} of them instead of {self.ranks}"
        return ""


class EqualEpochs:
    """`Epochs` of a training whose keys do not change.

    Args:
        begun: the epoch in which it goes on on another number of ranks.
    """

    def __init__(self, settings: Settings, comm: Communicator, begun: BegunEpoch | None) -> None:
        self._settings = settings
        self._comm = comm
        self._begun = begun

    def keys(self, epoch: int) -> Mapping[str, Any]:
        return {}

    def feeds(self, feeds: Sequence[Feed], epoch: int) -> list[Feed]:
        begun = self._begun
        train = self._settings.train
        if begun is None or begun.number != epoch:
            return list(feeds)

        def as_begun() -> list[Feed]:
            return [
                with_keys(feed, self._settings, train, begun.ranks) if feed.name == train.name and feed.only is None else feed
                for feed in feeds
            ]

        return together(self._comm, as_begun, name="feeds_of_epoch")


OpenEpochs = Callable[[Settings, Communicator, Learner, Watchdog, ExitStack, BegunEpoch | None, bool], Epochs | None]

EPOCHS: Registry[OpenEpochs] = Registry("epochs")
"""Those of plug-ins: functions of the settings and so on, as `open_epochs`, with the epoch in which training goes on on another
number of ranks; None: the keys do not change."""


def open_epochs(
    settings: Settings,
    comm: Communicator,
    learner: Learner,
    watchdog: Watchdog,
    at_the_end: ExitStack,
    current: EpochProgress | None,
    copies_local: bool,
) -> Epochs:
    """What differs between the epochs.

    Args:
        at_the_end: closes what is opened.
        current: of the epoch in which training resumes; None: it begins with an epoch.
        copies_local: whether files that could be read where they are get local copies, too, if `cache_dir` is set.

    Raises:
        ConfigError: the model asks for keys of epochs, and there is no plug-in for them.
    """
    began_on = None if current is None else current.made_from.get("ranks")
    begun = None
    if current is not None and began_on not in (None, str(comm.size)):
        begun = BegunEpoch(current.epoch, int(str(began_on)))
    if begun is not None and (line := begun.line(settings, comm.size)):
        log.warning(line)
    for open_changing in EPOCHS.values():
        if (epochs := open_changing(settings, comm, learner, watchdog, at_the_end, begun, copies_local)) is not None:
            return epochs
    if learner.keys_of_epoch is not None:
        raise ConfigError.of("unsupported", f"backend: expected a model without keys of epochs{absent('keys_of_epoch')}")
    return EqualEpochs(settings, comm, begun)
