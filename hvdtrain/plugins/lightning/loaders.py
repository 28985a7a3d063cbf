"""The loaders of a module or its datamodule as datasets of hvdtrain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import hvdtrain
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.lightning.arguments import Extent
from hvdtrain.plugins.lightning.given import Given
from hvdtrain.plugins.loaders.loader import is_loader, read_loader


class Loaders:
    """The loaders, each asked for once.

    Attributes:
        num_val: how many there are to evaluate.
    """

    def __init__(self, given: Given, extent: Extent) -> None:
        self._given = given
        self._extent = extent
        self._values = given.values
        number = self._values.get("num_val_loaders")
        self.num_val = int(given.is_validated if number is None else number)
        self._loaders: dict[str, list[Any]] = {}
        self._order: Any = "default"

    def keys(self) -> dict[str, Any]:
        """The keys of the datasets that the config does not give itself."""
        found: dict[str, Any] = {}
        task = self._values.get("task")
        if self._values.get("train") is None:
            found["train"] = {"class": lambda: self.data("train"), "seq_ordering": self.order, "max_batches": self.of_epoch}
        if self.num_val and task != "test":
            found["dev"] = self._evaluated("val")
            found["eval_datasets"] = {f"val{place}": self._evaluated("val", place) for place in range(1, self.num_val)}
        if task == "eval" and self._values.get("eval") is None and self._owner("test") is not None:
            found["eval"] = self._evaluated("test")
        if task in ("forward", "search"):
            found["forward_data"] = self._evaluated("predict")
        return found

    @cached_property
    def _stages(self) -> set[str]:
        """Those that were set up."""
        given, module = self._given, self._given.module
        owner = given.datamodule or module
        hvdtrain.run_on_main(lambda: owner.prepare_data(), once_per="host" if owner.prepare_data_per_node else "job")
        if given.datamodule is not None and given.overrides("prepare_data", module):
            hvdtrain.run_on_main(lambda: module.prepare_data(), once_per="host")
        return set()

    def set_up(self, stage: str) -> None:
        """Collective, the first time. Call `prepare_data` and `setup`."""
        if stage in self._stages:
            return
        self._stages.add(stage)
        if self._given.datamodule is not None:
            self._given.datamodule.setup(stage)
        for callback in self._given.callbacks:
            callback.setup(self._given.module.trainer, self._given.module, stage)
        self._given.module.setup(stage)

    def _owner(self, kind: str) -> Any:
        """The datamodule or the module, whichever has a method for the loaders of a kind; None: none has."""
        owners = [one for one in (self._given.datamodule, self._given.module) if one is not None]
        return next((one for one in owners if self._given.overrides(f"{kind}_dataloader", one)), None)

    def of(self, kind: str) -> list[Any]:
        """The loaders of train, val, test or predict. Collective, the first time. Raises: ConfigError, if there are none."""
        if kind not in self._loaders:
            given = self._values.get({"train": "train", "val": "dev"}.get(kind, ""))
            if given is None:
                validates = kind == "val" and self._values.get("task") == "eval"
                self.set_up("validate" if validates else {"train": "fit", "val": "fit"}.get(kind, kind))
                if (owner := self._owner(kind)) is None:
                    hint = " (without an evaluation: num_val_loaders = 0)" if kind == "val" else ""
                    raise ConfigError.of("missing", f"lightning_module: expected {kind}_dataloader, got none{hint}")
                given = getattr(owner, f"{kind}_dataloader")()
            if type(given).__name__ == "CombinedLoader" and given._mode == "sequential":
                given = given.iterables
            if isinstance(given, Mapping) or type(given).__name__ == "CombinedLoader":
                got = f"a {type(given).__name__}"
                raise ConfigError.of("wrong-type", f"{kind}_dataloader: expected a loader, or a list of several, got {got}")
            loaders = list(given) if isinstance(given, (list, tuple)) else [given]
            expected = self.num_val if kind == "val" else 1
            if len(loaders) != expected:
                raise ConfigError.of(
                    "out-of-range",
                    f"lightning_module: expected {expected} from {kind}_dataloader, got {len(loaders)} (num_val_loaders says how "
                    "many there are to evaluate; for training, torch.utils.data.ConcatDataset joins several)",
                )
            self._loaders[kind] = loaders
        return self._loaders[kind]

    def seen(self, kind: str) -> list[Any]:
        """The loaders as `self.trainer` has them, whose length is that of the rank's part of the data."""
        numbers = [self._number(kind, place) if is_loader(loader) else len(loader) for place, loader in enumerate(self.of(kind))]
        return [one if len(one) == number else OfRank(one, number) for one, number in zip(self.of(kind), numbers, strict=True)]

    @property
    def items(self) -> Any:
        """The dataset of the loader for training; None: there is no such loader."""
        return None if self._values.get("train") is not None else getattr(self.of("train")[0], "dataset", None)

    def data(self, kind: str, place: int = 0) -> Any:
        """What hvdtrain reads of one of them: the items of a DataLoader. Raises: ConfigError, if none can be planned."""
        loader = self.of(kind)[place]
        if not is_loader(loader):
            return loader
        objects, order = read_loader(f"{kind}_dataloader", loader)
        if kind == "train":
            self._order = order
        return objects

    def order(self, *, epoch: int, **_: Any) -> Any:
        """The order of the training data."""
        order = "default" if self._extent.overfits else self._order
        return order(epoch=epoch) if callable(order) else order

    def _evaluated(self, kind: str, place: int = 0) -> dict[str, Any]:
        """The keys of a dataset to evaluate."""
        return {
            "class": lambda: self.data(kind, place),
            "seq_ordering": "default",
            "max_batches": lambda **_: self.limited(kind, place),
        }

    def of_epoch(self, *, epoch: int, **_: Any) -> int:
        """The number of batches that a rank has in an epoch of training."""
        return self._extent.batches_in(epoch, self._number("train"), accumulated(self._values))

    @property
    def num_batches(self) -> int:
        """Those of a rank in an epoch of training; the last ones may be missing."""
        return self.limited("train")

    def limited(self, kind: str, place: int = 0) -> int:
        """The number of batches of a loader that a rank trains or evaluates."""
        return self._extent.batches(kind, self._number(kind, place))

    def _number(self, kind: str, place: int = 0) -> int:
        """The number of batches that a rank has of a loader."""
        return -(-self.num_of_all(kind, place) // hvdtrain.size())

    def num_of_all(self, kind: str, place: int = 0) -> int:
        """The number of batches that all ranks have of a loader."""
        loader = self.of(kind)[place]
        values = self._values
        size = (values.get("max_seqs_dev") if kind != "train" else None) or values.get("max_seqs") or loader.batch_size
        return int(-(-len(loader.dataset) // size) if size else len(loader))

    def are_even(self, kind: str, place: int) -> bool:
        """Whether all ranks have a batch in each step."""
        return self.limited(kind, place) * hvdtrain.size() <= self.num_of_all(kind, place)


class OfRank:
    """A loader with another length."""

    def __init__(self, loader: Any, length: int) -> None:
        self._loader = loader
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def accumulated(values: Mapping[str, Any]) -> int:
    """How many batches of a rank are in an update."""
    return int(values.get("accum_grad_multiple_step") or 1)


def place_of(dataset: str) -> int:
    """The number of a loader."""
    return int(dataset[3:]) if dataset.startswith("val") else 0
