"""The network of each epoch, and the graph of the present one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import tensorflow as tf
from returnn.config import Config, set_global_config
from returnn.util.basic import BackendEngine, BehaviorVersion

from hvdtrain.plugins.returnn.network.descriptions import Description, Descriptions
from hvdtrain.plugins.returnn.network.graph import GraphOptions, NetworkGraph
from hvdtrain.plugins.returnn.networks import NetworkSource
from hvdtrain.runtime import log

HONOURED_HERE = ("use_horovod", "horovod_scale_lr", "accum_grad_multiple_step", "distributed_tf", "torch_distributed")
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
        self._descriptions = Descriptions(self.config)
        self._epoch = 1
        self._warned_of: list[str] = []  # types of random operations
        self.graph = self._build(self._descriptions.of(1), 1)

    @property
    def num_pretrain_epochs(self) -> int:
        """The number of epochs whose networks `pretrain` determines."""
        return self._descriptions.num_pretrain_epochs

    def begin_epoch(self, epoch: int) -> None:
        """Build the network of an epoch, if it differs from the present one, which passes its parameters on."""
        if epoch != self._epoch and not self._descriptions.are_equal:
            description = self._descriptions.of(epoch)
            if description.differs_from(self.graph.description) or self.config.is_true("reinit_network_each_epoch"):
                old = self.graph
                self.graph = self._build(description, epoch)
                copy_parameters(old, self.graph, description)
                old.close()
        self._epoch = epoch
        with self.graph.graph.as_default():
            self.graph.network.set_run_opts(epoch=epoch, dataset_name="train")

    def keys(self, epoch: int) -> Mapping[str, Any]:
        """The keys with other values in an epoch, whose network is built for that."""
        self.begin_epoch(epoch)
        keys = self._descriptions.keys(epoch)
        return keys if self.graph.network.recurrent else {**keys, **self._keys_of_frames(keys)}

    def load(self, prefix: str, epoch: int | None) -> None:
        """Load a checkpoint of TensorFlow into the network of its epoch. Raises: ValueError, if it does not fit."""
        if epoch is not None and epoch != self._epoch and not self._descriptions.are_equal:
            description = self._descriptions.of(epoch)
            if description.differs_from(self.graph.description):
                self.graph.close()
                self.graph = self._build(description, epoch)
        self._epoch = self._epoch if epoch is None else epoch
        try:
            self.graph.load(prefix)
        except tf.errors.OpError as error:
            raise ValueError(str(error).splitlines()[0]) from None

    def _build(self, description: Description, epoch: int) -> NetworkGraph:
        graph = NetworkGraph(self._options, description.layers, epoch)
        if kinds := [name for name in graph.random_of_tensorflow if name not in self._warned_of]:
            self._warned_of += kinds
            log.warning(
                f"network: the random numbers of {', '.join(kinds)} start anew when a training is resumed within an epoch, and "
                "are the same on all ranks: TensorFlow keeps their state (uniform and normal numbers have no such limit)"
            )
        return graph

    def _keys_of_frames(self, changed: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of batches for a network that is not recurrent. RETURNN then ignores chunks and limits of lengths, and a batch
        may have a sequence more than `max_seqs`."""
        most = changed.get("max_seqs", self.config.typed_value("max_seqs", -1))
        keys = {"frame_batches": True, "chunking": None, "max_seq_length": None, "min_seq_length": None, "max_pad_size": None}
        return keys if most in (None, -1) else {**keys, "max_seqs": most + 1}


def copy_parameters(old: NetworkGraph, new: NetworkGraph, description: Description) -> None:
    """Copy the parameters of a network to the next one, as RETURNN's engine does; others keep their initial values."""
    with old.graph.as_default():
        values = old.network.get_params_serialized(old.session)
    with new.graph.as_default():
        for layer in new.network.get_output_layers() if description.skips_output else ():
            values.values_dict.pop(layer.name, None)
        callback = new.options.config.typed_value("init_new_network_callback")
        if callback is not None:
            callback(session=new.session, new_epoch=new.epoch, new_network=new.network, old_network_params=values)
        new.network.set_params_by_serialized(
            values,
            session=new.session,
            ignore_wrong_shape=description.ignores_differences,
            copy_param_mode=description.copies,
            ignore_non_existing=description.ignores_differences,
        )
    new.set_step(old.step)


def returnn_config(source: NetworkSource) -> Config:
    """RETURNN's config, as its functions see it; it becomes the global one."""
    config = Config()
    config.typed_dict = {name: value for name, value in source.values.items() if name not in HONOURED_HERE}
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
        graph_options = options.get("graph_options", {})
        graph = protos.GraphOptions(**graph_options) if isinstance(graph_options, Mapping) else deepcopy(graph_options)
        graph.rewrite_options.dependency_optimization = rewriting.OFF
        options["graph_options"] = graph
    visible = tf.config.get_visible_devices("GPU")
    options["device_count"] = {"GPU": len(visible), **options.get("device_count", {})}
    if visible:
        gpu_options = options.get("gpu_options", {})
        number = visible[0].name.rpartition(":")[2]
        options["gpu_options"] = (
            protos.GPUOptions(**{"allow_growth": True, "visible_device_list": number, **gpu_options})
            if isinstance(gpu_options, dict)
            else gpu_options
        )
    return options
