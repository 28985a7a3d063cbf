"""`returnn.tensor.TensorDict`: the tensors of a batch by data key."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from hvdtrain.returnn_layer.tensors import Tensor, no_attribute


class TensorDict:
    """Tensors by name: what a step gets as `extern_data`.

    Args:
        made_when_asked: what makes Tensors that seldom anybody asks for.

    Attributes:
        data: the dict itself.
    """

    def __init__(
        self, data: Mapping[str, Tensor] | None = None, made_when_asked: Mapping[str, Callable[[], Tensor]] | None = None
    ) -> None:
        self.data: dict[str, Tensor] = dict(data or {})
        self._made_when_asked = dict(made_when_asked or {})

    def __getitem__(self, name: str) -> Tensor:
        if name in self._made_when_asked and name not in self.data:
            self.data[name] = self._made_when_asked[name]()
        if name not in self.data:
            raise KeyError(f"{name!r}: expected one of the data keys {', '.join(self.data)}")
        return self.data[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self.data[name] = tensor

    def __contains__(self, name: object) -> bool:
        return name in self.data or name in self._made_when_asked

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def keys(self) -> KeysView[str]:
        return self.data.keys()

    def values(self) -> ValuesView[Tensor]:
        return self.data.values()

    def items(self) -> ItemsView[str, Tensor]:
        return self.data.items()

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name)

    def __repr__(self) -> str:
        return f"TensorDict({self.data})"
