"""The network of each epoch, and the graph of the present one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from returnn.config import Config, set_global_config
from returnn.util.basic import BackendEngine, BehaviorVersion

from hvdtrain.errors import ConfigError
from hvdtrain.learner.returnn_tf.graph import GraphOptions, NetworkGraph
from hvdtrain.learner.returnn_tf.source import NetworkSource

OWN = ("use_horovod", "horovod_scale_lr", "accum_grad_multiple_step", "distributed_tf", "torch_distributed")
"""Keys that hvdtrain itself honours, and RETURNN's functions must not."""


class Networks:
    """The networks of a config.

    Args:
        make_options: makes the options of graphs, given RETURNN's config and the options of a session.
        threads: with which a session computes.
        is_shared: whether ranks exchange gradients.

    Attributes:
        graph: of the present epoch.
    """

    def __init__(self, source: NetworkSource, make_options: Callable[..., GraphOptions], threads: int, is_shared: bool) -> None:
        self.config = returnn_config(source)
        session_options = options_of_session(self.config, threads, is_shared)
        self._options = make_options(config=self.config, session=session_options)
        self._epoch = 1
        self.graph = NetworkGraph(self._options, self._description(1), 1)

    def begin_epoch(self, epoch: int) -> None:
        """Build the network of an epoch, if it differs from the present one."""
        self._epoch = epoch
        with self.graph.graph.as_default():
            self.graph.network.set_run_opts(epoch=epoch, dataset_name="train")

    def load(self, prefix: str, epoch: int | None) -> None:
        """Load a checkpoint of TensorFlow into the network of its epoch. Raises: ValueError, if it does not fit."""
        try:
            self.graph.load(prefix)
        except tf.errors.OpError as error:
            raise ValueError(str(error).splitlines()[0]) from None

    def _description(self, epoch: int) -> dict[str, Any]:
        """The dict of layers of an epoch."""
        function = self.config.typed_value("get_network")
        description = function(epoch=epoch) if callable(function) else self.config.typed_value("network")
        if not isinstance(description, dict):
            name = "get_network" if callable(function) else "network"
            raise ConfigError.of("wrong-type", f"{name}: expected a dict of layers, got {type(description).__name__}")
        return description


def returnn_config(source: NetworkSource) -> Config:
    """RETURNN's config, as its functions see it; it becomes the global one."""
    config = Config()
    config.typed_dict = {name: value for name, value in source.values.items() if name not in OWN}
    set_global_config(config)
    if config.bool("nadam", False) and not config.typed_value("optimizer"):
        config.typed_dict["optimizer"] = {"class": "nadam"}  # for this key, RETURNN makes a class that needs an old Keras
    try:
        importlib.import_module("tensorflow.python.training.training_ops")
    except ModuleNotFoundError:  # RETURNN's class reads the operations from where TensorFlow had them
        operations = importlib.import_module("tensorflow.python.ops.gen_training_ops")
        sys.modules["tensorflow.python.training.training_ops"] = operations
        vars(importlib.import_module("tensorflow.python.training"))["training_ops"] = operations
    if config.float("gradient_clip_global_norm", 0.0):
        config.typed_dict["log_grad_norm"] = True  # the norm that the update computes is also reported
    BackendEngine.select_engine(engine=BackendEngine.TensorFlowNetDict)
    version = config.typed_value("behavior_version")
    if BehaviorVersion.get_if_set() != version:
        BehaviorVersion._reset()  # another config in this process may have set it
        if version is not None:
            BehaviorVersion.set(version)
    return config


def options_of_session(config: Config, threads: int, is_shared: bool) -> Mapping[str, Any]:
    """The options of a session: those of `tf_session_opts`, the device and the threads of this rank."""
    options = dict(config.typed_value("tf_session_opts", None) or {})
    options.setdefault("intra_op_parallelism_threads", threads)
    options.setdefault("inter_op_parallelism_threads", max(2, threads))
    protos: Any = importlib.import_module("tensorflow.core.protobuf.config_pb2")
    if is_shared or config.bool("decouple_constraints", False):
        # It would let operations that only wait for a fed gradient compute what the fed value replaces.
        rewriting: Any = importlib.import_module("tensorflow.core.protobuf.rewriter_config_pb2").RewriterConfig
        off = rewriting(dependency_optimization=rewriting.OFF)
        options.setdefault("graph_options", protos.GraphOptions(rewrite_options=off))
    visible = tf.config.get_visible_devices("GPU")
    options["device_count"] = {"GPU": len(visible), **options.get("device_count", {})}
    if visible:
        given = options.get("gpu_options", {})
        number = visible[0].name.rpartition(":")[2]
        options["gpu_options"] = (
            protos.GPUOptions(**{"allow_growth": True, "visible_device_list": number, **given})
            if isinstance(given, dict)
            else given
        )
    return options
