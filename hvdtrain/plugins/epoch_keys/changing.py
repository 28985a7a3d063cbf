"""Keys that change with the epoch: those that the config's `keys_of_epoch` returns, or that a framework's model asks for.

The keys of an epoch are checked like a config with these keys, before its batches are planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any

from hvdtrain.comm.alike import check_alike
from hvdtrain.comm.base import Communicator, together
from hvdtrain.config.foreign import ALIASES
from hvdtrain.config.overrides import OVERRIDING
from hvdtrain.config.references import as_function
from hvdtrain.config.value_text import value_text
from hvdtrain.data.feed import Feed
from hvdtrain.data.keys import DatasetSpec
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.errors import ConfigError, DataError, Problem
from hvdtrain.learner.base import Learner
from hvdtrain.plugins.epoch_keys import PerEpochKeys
from hvdtrain.plugins.epoch_keys.epoch_settings import settings_of_epoch, value_of
from hvdtrain.runtime import log
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.settings import DATASETS, Settings
from hvdtrain.start_up.data import check_limits, copy_data, open_datasets, with_keys
from hvdtrain.start_up.epochs import BegunEpoch

KEYS_OF_CONFIG = "the values of the config again"

EVALUATIONS = "evaluations"
"""Beside keys, what was warned of."""

ORDER = frozenset(field.name for field in fields(OrderKeys))


@dataclass(frozen=True)
class EpochKeys:
    """The keys of an epoch that have another value than in the config.

    Attributes:
        keys: as the config's function or the model gives them.
        settings: those of the epoch.
        values: of these keys in the settings.
    """

    epoch: int
    keys: Mapping[str, Any]
    settings: Settings
    values: Mapping[str, Any]


@dataclass(frozen=True)
class OpenDataset:
    """A dataset of one epoch or more that is not the config's.

    Attributes:
        value: of its key in that epoch.
        copies: keeps the local copies of its files.
    """

    value: Any
    feed: Feed
    copies: ExitStack

    def close(self) -> None:
        self.feed.dataset.close()
        self.copies.close()


class ChangingEpochs:
    """`Epochs` of a training whose keys change, or that goes on on another number of ranks.

    Args:
        settings: of the config.
        name: where the keys come from.
        keys_of: returns the keys of an epoch and their values.
        begun: the epoch in which it goes on on another number of ranks.
        copies_local: whether files that could be read where they are get local copies, too, if `cache_dir` is set.
    """

    def __init__(
        self,
        settings: Settings,
        comm: Communicator,
        watchdog: Watchdog,
        name: str,
        keys_of: Callable[[int], Mapping[str, Any]],
        begun: BegunEpoch | None = None,
        copies_local: bool = True,
    ) -> None:
        self._settings = settings
        self._comm = comm
        self._watchdog = watchdog
        self._name = name
        self._keys_of = keys_of
        self._begun = begun
        self._copies_local = copies_local
        self._latest = EpochKeys(0, {}, settings, {})
        self._noted: Mapping[str, str] = {}  # as text, the keys in the log
        self._warned: set[str] = set()
        self._checked: Mapping[str, str] = {}  # those whose data keys were compared with the data
        self._opened: dict[str, OpenDataset] = {}

    def keys(self, epoch: int) -> Mapping[str, Any]:
        return self._keys_in(epoch).values

    def feeds(self, feeds: Sequence[Feed], epoch: int) -> list[Feed]:
        epoch_keys = self._keys_in(epoch)
        settings = epoch_keys.settings
        specs = {spec.name: spec for spec in settings.datasets}
        values = {
            feed.name: value
            for feed in feeds
            if feed.only is None and (value := self._replacing_value(feed, epoch_keys.keys)) is not None
        }
        self._warn_of_evaluations([name for name in values if name != settings.train.name])
        self._close_replaced(values)
        copies = {name: self._copy(settings, specs[name]) for name in values if name not in self._opened}

        def configure() -> list[Feed]:
            for feed in feeds:
                if feed.name in copies:
                    self._open(feed, values[feed.name], settings, specs[feed.name], *copies[feed.name])
            changed = [
                feed if feed.only is not None else self._with_keys(feed, settings, specs[feed.name], feed.name in values)
                for feed in feeds
            ]
            if self._noted != self._checked:
                check_limits(settings, changed[0].dataset.streams)
                self._checked = self._noted
            return changed

        return together(self._comm, configure, name="feeds_of_epoch")

    def close(self) -> None:
        for opened in self._opened.values():
            opened.close()

    def _keys_in(self, epoch: int) -> EpochKeys:
        """Collective where the epoch is not that of the last call."""
        if self._latest.epoch != epoch:
            where = f"{self._name}(epoch={epoch})"

            def work() -> tuple[Mapping[str, Any], Settings]:
                keys = {ALIASES.get(name, name): value for name, value in self._keys_of(epoch).items()}
                return keys, settings_of_epoch(self._settings, keys, where) if keys else self._settings

            keys, settings = together(self._comm, work, name="keys_of_epoch")
            texts = {name: value_text(value) for name, value in keys.items()}
            check_alike(self._comm, "keys_of_epoch", texts, of=f"{where}: ")
            if texts != self._noted:
                log.detail(f"epoch {epoch}: {', '.join(f'{name} = {text}' for name, text in texts.items()) or KEYS_OF_CONFIG}")
                self._warn_of_overrides(where, keys)
                self._noted = texts
            self._latest = EpochKeys(epoch, keys, settings, {name: value_of(settings, name) for name in keys})
        return self._latest

    def _warn_of_overrides(self, where: str, keys: Mapping[str, Any]) -> None:
        """Warn of keys that the command line sets, too, once of each."""
        for name in sorted(keys.keys() - self._warned):
            value = value_of(self._settings, name)
            origin = self._settings.origins.get(name)
            if origin in OVERRIDING and not same_data(keys[name], value):
                self._warned.add(name)
                log.warning(f"{where}: {name} = {value_text(keys[name])} holds in its epochs, not {origin}'s {value_text(value)}")

    def _warn_of_evaluations(self, replaced: Sequence[str]) -> None:
        """Warn once that the scores of these datasets are not those of the same data in all epochs."""
        if replaced and EVALUATIONS not in self._warned:
            self._warned.add(EVALUATIONS)
            log.warning(
                f"{self._name}: {', '.join(replaced)} has other data than in other epochs, so that scores do not compare: the "
                "best epoch, averages of checkpoints, rates and ends that go by them are chosen from scores of different data"
            )

    def _replacing_value(self, feed: Feed, keys: Mapping[str, Any]) -> Any:
        """The value of a dataset's key in an epoch, if it is other data than the config's."""
        value = value_of_dataset(feed.name, keys)
        return None if value is None or same_data(value, value_of_dataset(feed.name, vars(self._settings.data))) else value

    def _close_replaced(self, values: Mapping[str, Any]) -> None:
        """Close the datasets in whose place others have to be opened."""
        for name, value in values.items():
            if name in self._opened and not same_data(self._opened[name].value, value):
                self._opened.pop(name).close()

    def _copy(self, settings: Settings, spec: DatasetSpec) -> tuple[ExitStack, Mapping[str, str]]:
        """Collective. Copy the files of a dataset to a local disk; what keeps the copies, and their places. Raises: DataError."""
        stack = ExitStack()
        remote_only = not self._copies_local
        return stack, copy_data(settings, [spec], self._comm, self._watchdog, stack, remote_only=remote_only)

    def _open(
        self, feed: Feed, value: Any, settings: Settings, spec: DatasetSpec, stack: ExitStack, copies: Mapping[str, str]
    ) -> None:
        """Open the dataset in place of the config's. Raises: DataError."""
        self._watchdog.beat(f"opening {feed.name}", "unhurried")
        [opened] = open_datasets(settings, self._comm, [spec], copies, self._watchdog, skips_broken=True)
        self._opened[feed.name] = OpenDataset(value, opened, stack)
        missing = [key for key in feed.dataset.streams if key not in opened.dataset.streams]
        if missing:
            raise DataError(
                f"{feed.name}: expected the data keys of the config's {feed.name} in every epoch "
                f"({', '.join(feed.dataset.streams)}), got none called {', '.join(missing)} from {self._name}"
            )
        for key, usual in feed.dataset.streams.items():
            stream = opened.dataset.streams[key]
            if (stream.shape, stream.sparse) != (usual.shape, usual.sparse):  # a model may take pictures of any size
                log.warning(
                    f"{feed.name}, data key {key!r}: {stream.words} from {self._name}, the config's {feed.name} has {usual.words}"
                )

    def _with_keys(self, feed: Feed, settings: Settings, spec: DatasetSpec, is_other: bool) -> Feed:
        """One dataset with the keys of an epoch. Raises: DataError."""
        begun = self._begun if spec is settings.train else None
        ranks = begun.ranks if begun is not None and begun.number == self._latest.epoch else self._comm.size
        return with_keys(self._opened[feed.name].feed if is_other else feed, settings, spec, ranks)


def value_of_dataset(name: str, keys: Mapping[str, Any]) -> Any:
    """The value of a dataset among keys; None: they have none."""
    return (keys.get("eval_datasets") or {}).get(name, keys.get(name) if name in DATASETS else None)


def same_data(first: Any, second: Any) -> bool:
    """Whether two values of a dataset's key are the same data, perhaps in another order.

    >>> same_data({"files": "a.hdf", "partition_epoch": 2}, {"files": "a.hdf"}), same_data({"files": "a.hdf"}, "a.hdf")
    (True, False)
    """
    if isinstance(first, dict) and isinstance(second, dict):
        first, second = ({name: entry for name, entry in value.items() if name not in ORDER} for value in (first, second))
    try:
        return bool(first == second)
    except Exception:  # arrays, whose elements are compared
        return False


def open_changing(
    settings: Settings,
    comm: Communicator,
    learner: Learner,
    watchdog: Watchdog,
    at_the_end: ExitStack,
    begun: BegunEpoch | None,
    copies_local: bool,
) -> ChangingEpochs | None:
    """What differs between the epochs, by the key `keys_of_epoch` or by the learner's model. The arguments are those of
    `start_up/epochs.py`."""
    function = as_function(settings.of(PerEpochKeys).keys_of_epoch, "keys_of_epoch")
    model_keys = learner.keys_of_epoch
    if function is None and model_keys is None:
        return None

    def keys_of(epoch: int) -> Mapping[str, Any]:
        keys = {} if function is None else function(epoch=epoch)
        if keys is not None and not (isinstance(keys, Mapping) and all(isinstance(name, str) for name in keys)):
            raise ConfigError(
                [Problem.of("wrong-result", f"keys_of_epoch: expected a dict of keys for epoch {epoch}, got {keys!r}")]
            )
        return {**(keys or {}), **({} if model_keys is None else model_keys(epoch))}

    epochs = ChangingEpochs(
        settings, comm, watchdog, "#config" if function is None else "keys_of_epoch", keys_of, begun, copies_local
    )
    if not settings.process.is_own:  # else the process ends
        at_the_end.callback(epochs.close)
    return epochs
