"""Which network, which learning rate and which keys RETURNN's `pretrain` and `get_network` give an epoch, and the parts of an
objective."""

from typing import Any

import pytest
from launching import faults

from hvdtrain.errors import ConfigError
from hvdtrain.plugins.returnn.network.descriptions import Descriptions
from hvdtrain.plugins.returnn.network.objective import depends_on_feed, objective_of

NETWORK = {
    "one": {"class": "linear", "n_out": 3, "from": ["data"]},
    "two": {"class": "linear", "n_out": 3, "from": ["one"]},
    "output": {"class": "softmax", "loss": "ce", "from": ["two"]},
}


def described(**values: Any) -> Descriptions:
    from returnn.config import Config

    config = Config()
    config.typed_dict = {"network": NETWORK, "learning_rate": 0.1, **values}
    return Descriptions(config)


def shrink(idx: int, net_dict: dict[str, Any]) -> dict[str, Any] | None:
    if idx == 2:
        return None
    net_dict["one"]["n_out"] = idx + 1
    net_dict["#config"] = {"batch_size": 100 * (idx + 1)}
    net_dict["#copy_param_mode"] = "subset"
    if idx == 0:
        net_dict["#repetition"] = 2
    return net_dict


def test_pretraining_has_its_learning_rate_and_the_epoch_after_it_that_of_the_config() -> None:
    made = described(pretrain={"construction_algo": shrink}, pretrain_learning_rate=0.02)
    assert made.num_pretrain_epochs == 4
    assert [made.of(epoch).layers["one"]["n_out"] for epoch in range(1, 7)] == [1, 1, 2, 3, 3, 3]
    assert [made.keys(epoch) for epoch in range(1, 7)] == [
        {"batch_size": 100, "learning_rate": 0.02},
        {"batch_size": 100, "learning_rate": 0.02},
        {"batch_size": 200, "learning_rate": 0.02},
        {"learning_rate": 0.02},
        {"learning_rate": 0.1},
        {},
    ]
    assert [made.of(epoch).differs_from(made.of(epoch - 1).layers) for epoch in range(2, 7)] == [False, True, True, False, False]
    assert (made.of(1).copies, made.of(4).copies, made.of(5).ignores_differences) == ("subset", None, False)
    assert not made.are_equal


def test_rates_in_config_entries_need_learning_rate_control_in_every_epoch() -> None:
    def with_rate(idx: int, net_dict: dict[str, Any]) -> dict[str, Any] | None:
        return {**net_dict, "#config": {"learning_rate": 0.5}} if idx == 0 else None

    with pytest.raises(ConfigError) as caught:
        described(pretrain={"construction_algo": with_rate}).keys(1)
    assert faults(caught.value.problems) == ["pretrain: conflict"]
    made = described(pretrain={"construction_algo": with_rate}, use_learning_rate_control_always=True)
    assert [made.keys(epoch) for epoch in (1, 2, 3)] == [{"learning_rate": 0.5}, {}, {}]


def test_all_forms_of_pretraining_are_returnns() -> None:
    default = described(pretrain="default", pretrain_repetitions=[2, 1])
    assert [sorted(default.of(epoch).layers) for epoch in (1, 2, 3)] == [
        ["one", "output"],
        ["one", "output"],
        ["one", "output", "two"],
    ]
    kept = described(pretrain={"construction_algo": "from_input", "copy_output_layer": False})
    assert [sorted(kept.of(epoch).layers) for epoch in (1, 2)] == [["one", "output"], ["one", "output", "two"]]
    assert (kept.of(1).skips_output, default.of(1).skips_output) == (True, False)
    with pytest.raises(ConfigError, match="pretrain: .*invalid construction_algo 'nowhere'"):
        described(pretrain={"construction_algo": "nowhere"})


def test_keys_in_the_network_itself_hold_for_all_epochs_but_its_learning_rate_for_one() -> None:
    """As in RETURNN, which changes them when it makes the network, and back when the network of pretraining has others."""
    network = NETWORK | {"#config": {"max_seqs": 3, "learning_rate": 0.5}}
    made = described(network=network)
    assert [made.keys(epoch) for epoch in (1, 2, 3)] == [{"max_seqs": 3, "learning_rate": 0.5}, {"max_seqs": 3}, {"max_seqs": 3}]
    grown = described(network=network, pretrain={"construction_algo": shrink}, use_learning_rate_control_always=True)
    assert [grown.keys(epoch) for epoch in (3, 4, 5)] == [
        {"batch_size": 200},
        {"max_seqs": 3, "learning_rate": 0.5},
        {"max_seqs": 3},
    ]


def test_greedy_pretraining_is_refused_before_its_second_epoch() -> None:
    with pytest.raises(ConfigError) as caught:
        described(pretrain="default", pretrain_greedy=True)
    assert faults(caught.value.problems) == ["pretrain: unsupported"]


def test_constraints_on_parameters_are_separated_from_those_on_the_batch() -> None:
    """The former are added once for all ranks, the latter belong to the losses of a batch, which are summed."""
    import tensorflow as tf
    from returnn.config import Config
    from returnn.tf.network import ExternData, TFNetwork

    layers = {
        "one": {"class": "linear", "n_out": 3, "from": "data", "activation": None, "L2": 0.5},
        "two": {"class": "linear", "n_out": 9, "from": "one", "activation": None, "L2": 0.25, "spatial_smoothing": 2.0},
        "output": {"class": "softmax", "loss": "ce", "from": "two", "target": "classes"},
    }
    keys = {"extern_data": {"data": {"dim": 4}, "classes": {"dim": 5, "sparse": True}}}
    config = Config()
    config.typed_dict = keys
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        data = ExternData()
        data.init_from_config(config=config, auto_create_placeholders=True)
        network = TFNetwork(config=config, extern_data=data, train_flag=True, eval_flag=True, rnd_seed=1)
        network.construct_from_dict(layers)
        network.initialize_params(session)
        objective = objective_of(network)
        assert (len(objective.terms), depends_on_feed(objective.constraints)) == (2, False)
        params = [session.run(network.layers[name].params) for name in ("one", "two")]
        squares = [sum((values**2).sum() for values in of_layer.values()) for of_layer in params]
        found = session.run(objective.constraints)
        assert found == pytest.approx(0.5 * squares[0] + 0.25 * squares[1])
        feed = {data.data["data"].placeholder: [[[1.0, 0, 2, 3], [0.5, 1, 1, 1]]], data.data["classes"].placeholder: [[1, 4]]}
        feed |= {one.size_placeholder[0]: [2] for one in data.data.values()}
        feed |= {size: 1 for size in [data.get_batch_info().dim] if tf.is_tensor(size)}
        whole, of_batch, terms = session.run([objective.whole, objective.of_batch, [one.value for one in objective.terms]], feed)
        assert whole == pytest.approx(of_batch + found)
        assert of_batch == pytest.approx(sum(terms))
        assert terms[1] > 0


def test_get_network_is_asked_for_every_epoch() -> None:
    made = described(get_network=lambda epoch: NETWORK | {"#config": {"max_seqs": epoch}} if epoch < 3 else None)
    assert [made.keys(epoch) for epoch in (1, 2)] == [{"max_seqs": 1}, {"max_seqs": 2}]
    assert made.of(2).ignores_differences
    with pytest.raises(ConfigError, match="get_network: expected a dict of layers, got NoneType"):
        made.of(3)
    assert described().are_equal
    assert described().keys(1) == {}
