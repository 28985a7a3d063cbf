"""compute_metrics: of the predictions and labels of a whole dataset, as the Trainer calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from itertools import zip_longest
from typing import Any

from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_concat, nested_detach, nested_numpify

import hvdtrain
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.transformers.arguments import IGNORED


class Metrics:
    """An entry of `epoch_scores`.

    Args:
        compute: the function compute_metrics.
        preprocess: the function preprocess_logits_for_metrics; None: there is none.
    """

    def __init__(self, compute: Callable[[EvalPrediction], Mapping[str, float]], preprocess: Callable[..., Any] | None) -> None:
        self._compute, self._preprocess = compute, preprocess
        self._batches: list[tuple[Any, Any]] = []

    def add(self, outputs: Any, labels: Any, config: Any) -> None:
        """Keep a batch's tokens, if they are a tensor, or what the model returned beside its loss."""
        if isinstance(outputs, Mapping):
            left_out = {"loss", *getattr(config, "keys_to_ignore_at_inference", ["cache"])}
            outputs = tuple(value for name, value in outputs.items() if name not in left_out)
        elif isinstance(outputs, tuple):
            outputs = outputs[1:]
        if isinstance(outputs, tuple) and len(outputs) == 1:
            outputs = outputs[0]
        if self._preprocess is not None:
            outputs = self._preprocess(outputs, labels)
        self._batches.append((nested_numpify(nested_detach(outputs)), nested_numpify(nested_detach(labels))))

    def of_ranks(self, dataset: str, means: Mapping[str, float]) -> Mapping[str, float]:
        """Collective. The metrics of what all ranks have kept, of which rank 0 computes them."""
        by_rank = hvdtrain.all_gather(self._batches, name="compute_metrics")
        self._batches = []
        batches = [one for several in zip_longest(*by_rank) for one in several if one is not None]
        if dataset == "train" or not batches:
            return {}

        def compute() -> dict[str, float]:
            predictions, labels = zip(*batches, strict=True)
            predictions, labels = (reduce(_joined, several) for several in (predictions, labels))
            found = self._compute(EvalPrediction(predictions, labels))
            if not isinstance(found, Mapping):
                raise ConfigError.of("wrong-result", f"compute_metrics: expected a dict of numbers, got {found!r:.60}")
            return {name: number(name, value) for name, value in found.items()}

        return hvdtrain.run_on_main(compute)


def number(name: str, value: Any) -> float:
    """A metric as a number. Raises: ConfigError."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError.of(
            "wrong-result", f"compute_metrics: expected a number for {name!r}, got {value!r:.60} (name each number: f1_0, f1_1)"
        ) from None


def _joined(one: Any, other: Any) -> Any:
    return nested_concat(one, other, padding_index=IGNORED)


def labels_of(batch: Mapping[str, Any], names: list[str]) -> Any:
    """The labels of a batch: a tensor, or a tuple of several."""
    found = tuple(batch[name] for name in names)
    return found[0] if len(found) == 1 else found
