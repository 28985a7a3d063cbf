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
    """An entry of `epoch_scores`, of the functions `compute_metrics` and `preprocess_logits_for_metrics`."""

    def __init__(self, compute: Callable[[EvalPrediction], Mapping[str, float]], preprocess: Callable[..., Any] | None) -> None:
        self._compute = compute
        self._preprocess = preprocess
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
        batches = [batch for of_step in zip_longest(*by_rank) for batch in of_step if batch is not None]
        if dataset == "train" or not batches:
            return {}

        def compute() -> dict[str, float]:
            predictions, labels = (reduce(_joined, values) for values in zip(*batches, strict=True))
            metrics = self._compute(EvalPrediction(predictions, labels))
            if not isinstance(metrics, Mapping):
                raise ConfigError.of("wrong-result", f"compute_metrics: expected a dict of numbers, got {metrics!r:.60}")
            return {name: number(name, value) for name, value in metrics.items()}

        return hvdtrain.run_on_main(compute)


def number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError.of(
            "wrong-result", f"compute_metrics: expected a number for {name!r}, got {value!r:.60} (name each number: f1_0, f1_1)"
        ) from None


def _joined(values: Any, more: Any) -> Any:
    return nested_concat(values, more, padding_index=IGNORED)


def labels_of(batch: Mapping[str, Any], names: list[str]) -> Any:
    labels = tuple(batch[name] for name in names)
    return labels[0] if len(labels) == 1 else labels
