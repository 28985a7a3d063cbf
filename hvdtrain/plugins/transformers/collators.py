"""The data collator: which columns it gets, and random masks that belong to the items, not to the batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
from transformers import DataCollatorForLanguageModeling

from hvdtrain.plugins.transformers.arguments import IGNORED


class Collate:
    """The collator, for items without the columns that the model does not take. `columns`: those that it takes; None: all."""

    def __init__(self, collator: Any, columns: Callable[[], set[str]] | None) -> None:
        if getattr(collator, "seed", None) is not None and hasattr(collator, "create_rng"):
            collator = copy(collator)
            collator.seed = None  # its own generator would begin anew after a resume
        self._collator = collator
        self._find_columns = columns
        self._columns: set[str] | None = None

    def __call__(self, items: list[Any]) -> Any:
        if self._find_columns is not None and isinstance(items[0], Mapping):
            if self._columns is None:
                self._columns = self._find_columns()
            items = [{name: value for name, value in item.items() if name in self._columns} for item in items]
        return self._collator(items)

    def dataset(self, items: Any) -> dict[str, Any]:
        """The entries of a dataset of the config."""
        if self._masks_each_item:
            return {"class": lambda: Masked(items, self), "collate": self.pad}
        return {"class": lambda: items, "collate": self}

    @property
    def _masks_each_item(self) -> bool:
        """Whether what the collator does to an item does not depend on the others, but for padding."""
        kind = type(self._collator)
        usual = DataCollatorForLanguageModeling
        is_usual = isinstance(self._collator, usual) and (kind.__call__, kind.torch_call) == (usual.__call__, usual.torch_call)
        return is_usual and self._collator.mlm and self._collator.tokenizer.pad_token_id is not None

    def pad(self, items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        tokenizer = self._collator.tokenizer
        padding = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id, "labels": IGNORED}
        is_left = tokenizer.padding_side == "left"
        batch = {}
        for name, first in items[0].items():
            rows = [item[name] for item in items]
            if first.ndim == 1:
                missing = [max(map(len, rows)) - len(row) for row in rows]
                sides = [(number, 0) if is_left else (0, number) for number in missing]
                value = padding.get(name, 0)
                rows = [torch.nn.functional.pad(row, side, value=value) for row, side in zip(rows, sides, strict=True)]
            batch[name] = torch.stack(rows)
        return batch


class Masked:
    """Items that are masked when they are read: the masks depend on the seed, the epoch and the item, on any number of ranks."""

    def __init__(self, items: Any, collate: Collate) -> None:
        self._items = items
        self._collate = collate
        self.lengths = getattr(items, "lengths", None)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[0] for name, value in self._collate([copy(self._items[index])]).items()}
