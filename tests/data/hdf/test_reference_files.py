"""RETURNN's own files: every value is what RETURNN's HDFDataset reads, with several dynamic axes and its writer's padding."""

from pathlib import Path

import numpy
import pytest
from hdf_files import BY_RETURNN
from returnn.datasets.hdf import HDFDataset as ReturnnDataset

from hvdtrain.data.hdf.dataset import open_hdf


@pytest.mark.parametrize("name", ["a", "b", "c", "e"])
def test_returnns_files_read_as_by_returnn(name: str) -> None:
    path = BY_RETURNN / f"{name}.hdf"
    ours, theirs = open_hdf([path]), ReturnnDataset([str(path)])
    theirs.init_seq_order(1)
    theirs.load_seqs(0, theirs.num_seqs)
    assert ours.num_sequences == theirs.num_seqs
    assert set(ours.streams) == set(theirs.get_data_keys())
    assert ours.tags(range(ours.num_sequences)) == [theirs.get_tag(index) for index in range(theirs.num_seqs)]
    for index in range(ours.num_sequences):
        for key, values in ours.sequence(index).items():
            expected = theirs.get_data(index, key)
            if key == "txt":
                expected = numpy.array([text.decode() for text in expected], dtype=object)
            assert values.dtype == expected.dtype
            assert numpy.array_equal(values, expected), (index, key)
            assert ours.lengths[key][index] == theirs.get_seq_length(index)[key]
    for key, stream in ours.streams.items():
        assert stream.dim == theirs.get_data_dim(key)
        assert stream.sparse == theirs.is_data_sparse(key) or key == "txt"  # RETURNN has no word for texts


def test_several_dynamic_axes_are_put_together_by_their_sizes() -> None:
    """They stay flat, as in RETURNN: a batch has one time axis. `sizes` says how a model folds them."""
    dataset = open_hdf([Path(BY_RETURNN / "e.hdf")])
    for index, (sizes, first) in enumerate(zip([(3, 4), (2, 1)], [0.0, None], strict=True)):
        sequence = dataset.sequence(index)
        assert tuple(sequence["sizes"]) == sizes
        folded = sequence["data"].reshape(*sequence["sizes"], 7)
        assert folded.shape == (*sizes, 7)
        assert numpy.array_equal(folded[1, 0], sequence["data"][sizes[1]])  # the last axis runs fastest
        assert first is None or folded[0, 0, 0] == first
