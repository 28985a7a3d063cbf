"""The functions of a config that compute with its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from hvdtrain.context import Loss, RunContext, Running
from hvdtrain.data.read_ahead import Staging
from hvdtrain.data.types import Batch
from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import TRAIN
from hvdtrain.learner.epoch_scores import with_statistics
from hvdtrain.learner.meter import BatchOutputs, check_marked_losses, check_marked_outputs
from hvdtrain.learner.torch.assembly import Metric, Watch
from hvdtrain.learner.torch.device import Autocast
from hvdtrain.learner.torch.tensors import array_of, extern_data_of, means_of_items

AS_FLOAT64 = partial(torch.as_tensor, dtype=torch.float64)


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


@dataclass(frozen=True)
class ConfigFunctions:
    """The config's model and the functions that use it, on one device.

    Attributes:
        forward_step: None if the config has none.
        autocast: creates the context in which the functions compute in half precision.
        watch: creates the context around calls that may compile the model.
        staging: copies batches to the device ahead of time; None: the device is the CPU.
        extra_models: by name, models that are neither trained nor saved.
    """

    model: torch.nn.Module
    train_step: Callable[..., None]
    forward_step: Callable[..., None] | None
    device: torch.device
    autocast: Autocast
    watch: Watch
    staging: Staging | None = None
    extra_models: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    metrics: Sequence[Metric] = ()

    def losses(self, batch: Batch, epoch: int, step: int, train: bool, dataset: str = TRAIN) -> dict[str, Loss]:
        """Run train_step; return the marked losses by name. Raises: ConfigError."""
        if self.model.training != train:
            self.model.train(train)
        for metric in self.metrics:
            metric.reset()
        run_context = RunContext(epoch, step, train, seq_tags=batch.row_tags, dataset=dataset, extra_models=self.extra_models)
        run_context.num_items = 0 if batch.collate is None else batch.num_items
        with self.autocast(), Running(run_context) as context:
            self.train_step(model=self.model, extern_data=extern_data_of(batch, self.device))
        check_marked_losses(context.losses, is_tensor)
        if batch.collate is not None:
            context.losses.update(means_of_items(context.losses, context.num_items))
        for metric in self.metrics:
            context.statistics.update(metric.states())
        return with_statistics(context, AS_FLOAT64) if context.statistics else context.losses

    def outputs(self, batch: Batch, epoch: int, step: int, dataset: str) -> BatchOutputs:
        """Run forward_step; return what it marks. Raises: ConfigError."""
        if self.forward_step is None:
            raise ConfigError.of("missing", "forward_step: expected a function in the config, got nothing")
        self.model.eval()
        run_context = Running(
            RunContext(epoch, step, False, seq_tags=batch.row_tags, dataset=dataset, extra_models=self.extra_models)
        )
        with torch.no_grad(), self.watch(), self.autocast(), run_context as context:
            self.forward_step(model=self.model, extern_data=extern_data_of(batch, self.device))
        check_marked_outputs(context.outputs)
        outputs = {}
        vectors = []
        for name, output in context.outputs.items():
            value = output.value
            if output.seq_lens is None and isinstance(value, torch.Tensor) and value.ndim == 2 and value.is_floating_point():
                vectors.append(name)
            outputs[name] = value, None if output.seq_lens is None else [int(length) for length in output.seq_lens]
        return BatchOutputs(outputs, vectors, array_of)
