"""The loaders of a module or its datamodule as datasets of hvdtrain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import hvdtrain
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.lightning.arguments import Extent
from hvdtrain.plugins.lightning.user_objects import UserObjects, overrides
from hvdtrain.plugins.loaders.loader import is_loader, read_loader
from hvdtrain.plugins.other_trainer.trainer import fixed_number


class Loaders:
    """The loaders, each asked for once."""

    def __init__(self, user: UserObjects, extent: Extent) -> None:
        self._user = user
        self._extent = extent
        self._values = user.values
        number = self._values.get("num_val_loaders")
        self.num_val = int(user.is_validated if number is None else number)  # how many there are to evaluate
        self._loaders: dict[str, list[Any]] = {}
        self._order: Any = "default"

    def keys(self) -> dict[str, Any]:
        """The keys of the datasets that the config does not give itself."""
        keys: dict[str, Any] = {}
        task = self._values.get("task")
        if self._values.get("train") is None:
            keys["train"] = {"class": lambda: self.data("train"), "seq_ordering": self.order, "max_batches": self.of_epoch}
        if self.num_val and task != "test":
            keys["dev"] = self._evaluated("val")
            keys["eval_datasets"] = {f"val{index}": self._evaluated("val", index) for index in range(1, self.num_val)}
        if task == "eval" and self._values.get("eval") is None and self._user.owner_of("test_dataloader") is not None:
            keys["eval"] = self._evaluated("test")
        if task in ("forward", "search"):
            keys["forward_data"] = self._evaluated("predict")
        return keys

    @cached_property
    def _stages(self) -> set[str]:
        """Those that were set up."""
        module = self._user.module
        datamodule = self._user.datamodule
        owner = datamodule or module
        hvdtrain.run_on_main(lambda: owner.prepare_data(), once_per="host" if owner.prepare_data_per_node else "job")
        if datamodule is not None and overrides("prepare_data", module):
            hvdtrain.run_on_main(lambda: module.prepare_data(), once_per="host")
        return set()

    def set_up(self, stage: str) -> None:
        """Collective, the first time. Call `prepare_data` and `setup`."""
        if stage in self._stages:
            return
        self._stages.add(stage)
        if self._user.datamodule is not None:
            self._user.datamodule.setup(stage)
        for callback in self._user.callbacks:
            callback.setup(self._user.module.trainer, self._user.module, stage)
        self._user.module.setup(stage)

    def of(self, kind: str) -> list[Any]:
        """The loaders of train, val, test or predict. Collective, the first time. Raises: ConfigError, if there are none."""
        if kind not in self._loaders:
            loaders = self._values.get({"train": "train", "val": "dev"}.get(kind, ""))
            if loaders is None:
                validates = kind == "val" and self._values.get("task") == "eval"
                self.set_up("validate" if validates else {"train": "fit", "val": "fit"}.get(kind, kind))
                if (owner := self._user.owner_of(f"{kind}_dataloader")) is None:
                    hint = " (without an evaluation: num_val_loaders = 0)" if kind == "val" else ""
                    raise ConfigError.of("missing", f"lightning_module: expected {kind}_dataloader, got none{hint}")
                loaders = getattr(owner, f"{kind}_dataloader")()
            if type(loaders).__name__ == "CombinedLoader" and loaders._mode == "sequential":
                loaders = loaders.iterables
            if isinstance(loaders, Mapping) or type(loaders).__name__ == "CombinedLoader":
                got = f"a {type(loaders).__name__}"
                raise ConfigError.of("wrong-type", f"{kind}_dataloader: expected a loader, or a list of several, got {got}")
            loaders = list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]
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
        loaders = self.of(kind)
        numbers = [self._number(kind, index) if is_loader(loader) else len(loader) for index, loader in enumerate(loaders)]
        pairs = zip(loaders, numbers, strict=True)
        return [loader if len(loader) == number else LoaderOfRank(loader, number) for loader, number in pairs]

    @property
    def items(self) -> Any:
        """The dataset of the loader for training; None: there is no such loader."""
        return None if self._values.get("train") is not None else getattr(self.of("train")[0], "dataset", None)

    def data(self, kind: str, loader_index: int = 0) -> Any:
        """What hvdtrain reads of one of them: the items of a DataLoader. Raises: ConfigError, if none can be planned."""
        loader = self.of(kind)[loader_index]
        if not is_loader(loader):
            return loader
        objects, order = read_loader(f"{kind}_dataloader", loader)
        if kind == "train":
            self._order = order
        return objects

    def order(self, *, epoch: int, **_: Any) -> Any:
        order = "default" if self._extent.overfits else self._order
        return order(epoch=epoch) if callable(order) else order

    def _evaluated(self, kind: str, loader_index: int = 0) -> dict[str, Any]:
        return {
            "class": lambda: self.data(kind, loader_index),
            "seq_ordering": "default",
            "max_batches": lambda **_: self.limited(kind, loader_index),
        }

    def of_epoch(self, *, epoch: int, **_: Any) -> int:
        """The number of batches of a rank in an epoch of training."""
        return self._extent.batches_in(epoch, self._number("train"), accumulated(self._values))

    def limited(self, kind: str, loader_index: int = 0) -> int:
        """The number of batches of a loader that a rank trains or evaluates."""
        return self._extent.batches(kind, self._number(kind, loader_index))

    def _number(self, kind: str, loader_index: int = 0) -> int:
        """Those that a rank has."""
        return -(-self.num_of_all(kind, loader_index) // hvdtrain.size())

    def num_of_all(self, kind: str, loader_index: int = 0) -> int:
        """The number of a loader's batches on all ranks."""
        loader = self.of(kind)[loader_index]
        values = self._values
        size = (values.get("max_seqs_dev") if kind != "train" else None) or values.get("max_seqs") or loader.batch_size
        return int(-(-len(loader.dataset) // size) if size else len(loader))

    def are_even(self, kind: str, loader_index: int) -> bool:
        """Whether all ranks have a batch in each step."""
        return self.limited(kind, loader_index) * hvdtrain.size() <= self.num_of_all(kind, loader_index)


class LoaderOfRank:
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
    return fixed_number("lightning_module", values, "accum_grad_multiple_step")


def loader_index_of(dataset: str) -> int:
    return int(dataset[3:]) if dataset.startswith("val") else 0
