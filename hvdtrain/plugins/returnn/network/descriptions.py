"""The dict of layers of every epoch, and the keys that change with it: `network`, `get_network` and `pretrain`.

RETURNN's own code makes the networks of `pretrain`. This module repeats what its engine does with them: which network, which
learning rate and which keys belong to an epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from returnn.config import Config
from returnn.pretrain import pretrain_from_config
from returnn.tf.engine import Engine

from hvdtrain.errors import ConfigError


@dataclass(frozen=True)
class Description:
    """The network of an epoch.

    Attributes:
        layers: the dict of layers, with RETURNN's entries such as `#config`.
        copies: how parameters are copied from the network before it: `copy_param_mode` of RETURNN.
        skips_output: whether those of the output layers are not copied.
        ignores_differences: whether parameters that only one of the networks has, or that have other shapes, are left out.
    """

    layers: dict[str, Any]
    copies: str | None = None
    skips_output: bool = False
    ignores_differences: bool = False

    def differs_from(self, layers: Mapping[str, Any]) -> bool:
        """Whether another network has to be built, as RETURNN's engine decides."""
        return bool(Engine._net_dict_diff(layers, self.layers))


class Descriptions:
    """The networks of a config's epochs. Raises: ConfigError, if RETURNN refuses `pretrain`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._function = config.typed_value("get_network")
        try:
            self._pretrain = pretrain_from_config(config)
        except Exception as error:  # of the config's function, or of RETURNN
            raise ConfigError.of("raised", f"pretrain: {type(error).__name__}: {error}") from error
        if self._pretrain is not None and self._pretrain.greedy:
            raise ConfigError.of("unsupported", "pretrain: expected greedy = False, got True, which RETURNN itself does not do")

    @property
    def are_equal(self) -> bool:
        """Whether all epochs have the same network and the same keys."""
        return self._pretrain is None and not callable(self._function) and not self._config.is_true("reinit_network_each_epoch")

    @property
    def num_pretrain_epochs(self) -> int:
        """The number of epochs whose networks `pretrain` determines."""
        return 0 if self._pretrain is None else int(self._pretrain.get_train_num_epochs())

    def of(self, epoch: int) -> Description:
        """The network of an epoch. Raises: ConfigError."""
        if epoch <= self.num_pretrain_epochs:
            layers = self._pretrain.get_network_json_for_epoch(epoch)
            copies = self._pretrain.copy_param_mode
            return Description(
                _check_dict("pretrain", layers),
                layers.get("#copy_param_mode", copies),
                not self._pretrain.copy_output_layer,
                True,
            )
        if callable(self._function):
            layers = _check_dict("get_network", self._function(epoch=epoch))
            return Description(layers, layers.get("#copy_param_mode"), ignores_differences=True)
        name = "network" if self._pretrain is None else "pretrain"
        layers = self._config.typed_value("network") if self._pretrain is None else self._pretrain.get_final_network_json()
        return Description(_check_dict(name, layers), (layers or {}).get("#copy_param_mode"))

    def keys(self, epoch: int) -> dict[str, Any]:
        """The keys with other values in an epoch: those of `#config`, and the learning rate of pretraining.

        In an epoch of `pretrain` the learning rate is `pretrain_learning_rate`, and in the next one that of the config;
        learning-rate control continues from there, unless `use_learning_rate_control_always` is set. The learning rate in the
        `#config` of `network` itself is that of one epoch, as in RETURNN; its other keys hold for all further epochs.
        """
        keys = dict(self.of(epoch).layers.get("#config", {}))
        number = self.num_pretrain_epochs
        if epoch > max(1, number) and not callable(self._function):
            keys.pop("learning_rate", None)
        first = self._config.float("learning_rate", 1.0)
        if number and not self._config.is_true("use_learning_rate_control_always"):
            if "learning_rate" in keys:
                raise ConfigError.of(
                    "conflict",
                    f"pretrain: expected a learning_rate in #config with use_learning_rate_control_always = True only, got it in "
                    f"epoch {epoch} (without that key, the rate is pretrain_learning_rate)",
                )
            if epoch <= number:
                keys["learning_rate"] = self._config.float("pretrain_learning_rate", first)
            elif epoch == number + 1:
                keys["learning_rate"] = first
        return keys


def _check_dict(name: str, layers: Any) -> dict[str, Any]:
    if not isinstance(layers, dict):
        raise ConfigError.of("wrong-type", f"{name}: expected a dict of layers, got {type(layers).__name__}")
    return layers
