"""A model of ESPnet2 as get_model, train_step and forward_step: the package espnet itself is not imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

import hvdtrain
from hvdtrain.config.references import as_function
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.other_trainer.trainer import OtherTrainer
from hvdtrain.runtime import log

KEY = "espnet_model"

POSITIONS = ("data", "classes")
"""The data keys that become the inputs which no data key is named after, in their order."""

INT_PADDING = -1
PADDED_WITH_0 = ("tts", "tts2", "gan_tts", "svs", "gan_svs", "enh", "gan_codec")
"""ESPnet's collate_fn pads integers with `INT_PADDING`, or with 0 in these packages of its tasks, as `int_pad_value` says."""


def keys_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that follow from `espnet_model`. Raises: ConfigError."""
    value = values[KEY]
    entries = dict(value) if isinstance(value, Mapping) else {"model": value}
    unknown = sorted(entries.keys() - {"model", "inputs", "int_pad_value"})
    make = as_function(entries.get("model"), f"{KEY}.model")
    if unknown or make is None:
        raise ConfigError.of(
            "wrong-type",
            f"{KEY}: expected a function that makes the model, or a dict with it as 'model', with 'inputs' and 'int_pad_value', "
            f"got {unknown or entries}",
        )
    return EspnetModel(make, entries.get("inputs") or {}, entries.get("int_pad_value")).keys()


class EspnetModel(OtherTrainer):
    """A model whose forward returns a loss, statistics and their weight.

    Args:
        make: returns it.
        inputs: by the name of an input of the model's forward, its data key.
        int_pad_value: what integers are padded with; None: the number of the model's task.
    """

    def __init__(self, make: Callable[[], Any], inputs: Mapping[str, str], int_pad_value: int | None) -> None:
        self._make = make
        self._inputs = dict(inputs)
        self._int_pad_value = int_pad_value
        self._inputs_of_model: dict[Any, dict[str, str]] = {}
        self._without_lengths: list[str] = []
        self._takes_tags = False

    def get_model(self, **_: Any) -> Any:
        return self._make()

    def train(self, batch: Mapping[str, Any]) -> None:
        """The loss and the statistics of a batch, each a mean with the batch's weight. Raises: ConfigError."""
        context = hvdtrain.get_run_ctx()
        result = self.model(**self._batch(self.model, batch))
        if isinstance(result, Mapping):
            if result.get("optim_idx") is not None:
                raise ConfigError.of(
                    "wrong-result", f"{KEY}: expected a model with one optimizer, got one that chooses among several (optim_idx)"
                )
            result = result["loss"], result["stats"], result["weight"]
        if not isinstance(result, (tuple, list)) or len(result) != 3:
            raise ConfigError.of(
                "wrong-result", f"{KEY}: expected forward to return (loss, stats, weight), got a {type(result).__name__}"
            )
        loss, stats, weight = result
        weight = torch.as_tensor(self.num_items if weight is None else weight, device=loss.device)
        context.mark_as_loss(
            (loss * weight.to(loss.dtype)).sum(), "loss", use_normalized_loss=True, custom_inv_norm_factor=weight.sum()
        )
        for name, value in (stats or {}).items():
            if name != "loss" and value is not None:
                value = torch.as_tensor(value, device=loss.device).detach()
                counts = weight * value.isfinite()  # as ESPnet's reporter, which leaves out what is no number
                sums = torch.where(counts > 0, value * weight, torch.zeros((), device=loss.device)).sum()
                context.mark_as_loss(sums, name, as_error=True, custom_inv_norm_factor=counts.sum())

    def forward_step(self, *, model: Any, extern_data: Mapping[str, Any], **_: Any) -> None:
        """The features of a batch, by the model's `collect_feats`. Raises: ConfigError, if there are none."""
        features = dict(model.collect_feats(**self._batch(model, extern_data)))
        names = [name for name in features if not name.endswith("_lengths")]
        if not names:
            raise ConfigError.of("wrong-result", f"{KEY}: expected features from collect_feats, got none")
        for name in names:
            lengths = features.get(f"{name}_lengths")
            output = "output" if name == names[0] else name
            hvdtrain.get_run_ctx().mark_as_output(features[name], output, seq_lens=None if lengths is None else lengths.cpu())

    def _batch(self, model: Any, extern_data: Mapping[str, Any]) -> dict[str, Any]:
        if model not in self._inputs_of_model:
            self._inputs_of_model[model] = self._find_inputs(model.forward, list(extern_data))
        batch: dict[str, Any] = {}
        padding = self._padding(model)
        for name, key in self._inputs_of_model[model].items():
            tensor = extern_data[key]
            values = tensor.raw_tensor
            if values.is_floating_point():
                values = values.squeeze(-1) if values.ndim == 3 and values.shape[-1] == 1 else values
            else:
                mask = tensor.mask.reshape(*tensor.mask.shape, *[1] * (values.ndim - 2))
                values = values.long().masked_fill(~mask, padding)
            batch[name] = values
            if name not in self._without_lengths:
                lengths = tensor.seq_lens if tensor.device_seq_lens is None else tensor.device_seq_lens
                batch[f"{name}_lengths"] = lengths.long()
        if self._takes_tags:
            batch["utt_id"] = hvdtrain.get_run_ctx().seq_tags()  # type: ignore[misc]
        return batch

    def _padding(self, model: Any) -> int:
        if self._int_pad_value is not None:
            return self._int_pad_value
        usual = 0 if {*type(model).__module__.split(".")} & {*PADDED_WITH_0} else INT_PADDING
        of_parts = [module.ignore_id for module in (model, *model.children()) if hasattr(module, "ignore_id")]  # as of EnhS2T
        return int([*of_parts, usual][0])

    def _find_inputs(self, forward: Callable[..., Any], keys: list[str]) -> dict[str, str]:
        """By the name of an input, its data key: those with lengths, and whatever else is in the data under a name of
        forward's, or under any if it has **kwargs, as in ESPnet. Raises: ConfigError, if an input has none.
        """
        parameters = inspect.signature(forward).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        wanted = [name for name in parameters if f"{name}_lengths" in parameters]
        inputs = {name: name for name in wanted} | self._inputs
        unnamed = [name for name in inputs if inputs[name] not in keys and name not in self._inputs]
        positions = [key for key in POSITIONS if key in keys and key not in inputs.values()]
        inputs |= dict(zip(unnamed, positions, strict=False))
        others = [key for key in keys if key not in inputs.values() and key not in POSITIONS]
        inputs |= {key: key for key in others if takes_any or key in parameters}
        absent = [name for name in inputs if inputs[name] not in keys]
        needed = [name for name in absent if name in self._inputs or parameters[name].default is inspect.Parameter.empty]
        unused = [key for key in keys if key not in inputs.values()]
        if needed or (unused and not wanted):
            raise ConfigError.of(
                "wrong-result",
                f"{KEY}: expected a data key for each input of forward ({', '.join(wanted) or 'none with _lengths'}), got "
                f"{', '.join(keys)} (name them: 'inputs': {{'speech': 'data', 'text': 'classes'}})",
            )
        if unused:
            log.warning(
                f"{KEY}: expected data keys that are inputs of forward ({', '.join(parameters)}), got {', '.join(unused)}, which "
                "is not used ('inputs' names them)"
            )
        self._takes_tags = takes_any or "utt_id" in parameters
        self._without_lengths = [name for name in parameters if f"{name}_lengths" not in parameters]
        return {name: key for name, key in inputs.items() if name not in absent}
