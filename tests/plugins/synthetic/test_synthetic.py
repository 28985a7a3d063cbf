"""Synthetic datasets."""

import numpy
import pytest
from opened_data import opened, problems_of

from hvdtrain.plugins.synthetic.keys import SYMBOLS, answers


def test_12ax_answers_are_right_and_depend_on_the_seed_alone() -> None:
    value = {"class": "Task12AXDataset", "num_seqs": 200, "fixed_random_seed": 7}
    dataset, again = opened(value), opened(value)
    other = opened({**value, "fixed_random_seed": 8})
    assert {key: (stream.dim, stream.sparse) for key, stream in dataset.streams.items()} == {
        "data": (9, False),
        "classes": (2, True),
    }
    rare = 0
    for index in range(200):
        arrays = dataset.sequence(index)
        symbols = "".join(SYMBOLS[place] for place in arrays["data"].argmax(axis=1))
        assert (arrays["data"].sum(axis=1) == 1).all()
        assert "".join("LR"[answer] for answer in arrays["classes"]) == answers(symbols)
        assert (again.sequence(index)["data"] == arrays["data"]).all()
        rare += int(arrays["classes"].sum())
    assert 0.05 < rare / dataset.lengths["data"].sum() < 0.3
    assert (dataset.lengths["data"].min(), dataset.lengths["data"].max()) >= (10, 90)
    assert not numpy.array_equal(dataset.lengths["data"], other.lengths["data"])


def test_dummy_has_the_sizes_asked_for() -> None:
    value = {"class": "DummyDataset", "input_dim": 2, "output_dim": 3, "num_seqs": 4}
    assert opened(value).sequence(3)["data"].tolist() == pytest.approx(numpy.array([[-0.2, -0.1], [0.0, 0.1]]))
    assert opened(value).sequence(3)["classes"].tolist() == [0, 1]
    dataset = opened({**value, "seq_len": {"data": 5, "classes": 0}})
    assert (dataset.sequence(0)["data"].shape, dataset.sequence(0)["classes"].shape) == ((5, 2), (0,))
    assert problems_of({**value, "seq_len": {"data": 5}}) == ["train.seq_len: out-of-range"]
    assert problems_of({**value, "num_seqs": 0, "input_dimm": 2}) == [
        "train.num_seqs: out-of-range",
        "train.input_dimm: unknown-key",
    ]
    assert len(problems_of({"class": "Task12AXDataset"})) == 1
