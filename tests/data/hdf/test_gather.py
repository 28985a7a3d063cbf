"""Sequences picked out of an array into a batch: the values, and memory that is reused once no array refers to it."""

import math

import numpy
import pytest

from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.padding import REUSED, Memory, gather, gather_packed, pack, pad, span
from hvdtrain.plugins.combine.union import concatenate
from hvdtrain.plugins.hdf_tools.writer import HDFWriter


def gathered(array, starts, lengths):
    return gather(array, numpy.array(starts), numpy.array(lengths, dtype=numpy.int32)).values


@pytest.mark.parametrize("shape", [(), (7,), (3, 40)])
@pytest.mark.parametrize("longest", [0, 1, 9, 400])
def test_a_gathered_batch_is_what_padding_the_sequences_one_by_one_makes(shape, longest):
    generator = numpy.random.default_rng(longest)
    array = generator.normal(size=(1000, *shape)).astype(numpy.float32)
    lengths = generator.integers(0, longest + 1, 50).astype(numpy.int32)
    lengths[0] = longest
    starts = generator.integers(0, 1000 - longest + 1, 50)
    sequences = [array[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    for _ in range(3):  # memory that was used before has other values in it
        expected, packed = pad(sequences), pack(sequences)
        assert numpy.array_equal(gathered(array, starts, lengths), expected.values)
        assert numpy.array_equal(gather_packed(array, starts, lengths).values, packed.values)
        for values in (expected.values, packed.values):
            values[...] = 1


def test_the_last_sequence_may_be_shorter_than_the_longest():
    array = numpy.arange(5, dtype=numpy.int8)
    assert gathered(array, [0, 4], [3, 1]).tolist() == [[0, 1, 2], [4, 0, 0]]


def test_frames_that_are_not_aligned():
    array = numpy.frombuffer(b"x" + numpy.arange(9, dtype=numpy.int32).tobytes(), numpy.int32, offset=1)
    assert not array.flags.aligned
    assert gathered(array, [2, 7], [1, 2]).tolist() == [[2, 0], [7, 8]]
    assert gathered(array, [2], [7]).tolist() == [[2, 3, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("dtype", [numpy.int8, numpy.int32, numpy.float32])
@pytest.mark.parametrize("offsets", [(0, 0, 0), (8, 0, 16), (1, 0, 3)])
def test_arrays_in_several_places_of_memory_are_gathered_as_one(shape, dtype, offsets):
    def array_of(number, offset):
        values = numpy.arange(9 * number * math.prod(shape)).astype(dtype).reshape(-1, *shape) + number
        if dtype is numpy.float32:
            values[:1] = numpy.nan  # the first frame stands for padding, too
        return numpy.frombuffer(bytes(offset) + values.tobytes(), dtype, offset=offset).reshape(values.shape)

    arrays = [array_of(number, offset) for number, offset in enumerate(offsets)]
    parts = [arrays[1][0:4], arrays[2][15:18], arrays[1][9:], arrays[2][2:7], arrays[0]]
    expected, packed = pad(parts), pack(parts)
    frames, places, step = span(arrays)
    del arrays, parts  # which the whole keeps alive
    assert not frames.flags.writeable
    starts = numpy.array([0, 15, 9, 2, 0]) * step + numpy.array(places)[[1, 2, 1, 2, 0]]
    assert numpy.array_equal(gather(frames, starts, expected.seq_lens, step).values, expected.values, equal_nan=True)
    assert numpy.array_equal(gather_packed(frames, starts, expected.seq_lens, step).values, packed.values, equal_nan=True)


def test_memory_is_used_again_when_the_last_view_is_gone():
    torch = pytest.importorskip("torch")
    memory = Memory()
    shape, dtype = (REUSED,), numpy.dtype(numpy.float32)

    def address(array):
        return array.__array_interface__["data"][0]

    first = memory.empty(shape, dtype)
    place = address(first)
    view = first.reshape(2, -1)[1:].T[5:]
    del first
    assert address(memory.empty(shape, dtype)) != place, "a view of a view still shows it"
    tensor = torch.from_numpy(view)[3:]
    del view
    held = [memory.empty(shape, dtype) for _ in range(3)]
    assert place not in map(address, held), "a tensor still shows it"
    del tensor
    assert address(memory.empty(shape, dtype)) == place


def test_memory_that_is_too_small_is_replaced():
    memory = Memory()
    small = memory.empty((REUSED,), numpy.dtype(numpy.int8))
    del small
    large = memory.empty((10 * REUSED,), numpy.dtype(numpy.int8))
    large[...] = 1
    assert large.sum(dtype=int) == 10 * REUSED
    del large
    kept = [memory.empty((REUSED,), numpy.dtype(numpy.int8)) for _ in range(9)]  # which do not hold the large piece
    assert [len(piece) > 10 * REUSED for piece in memory.free()] == [True]
    del kept
    assert [len(piece) for piece in memory.free()] == 8 * [REUSED * 5 // 4]


@pytest.mark.parametrize(("copies", "rows"), [(1, 30), (3, 60), (20, 30)])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_batch_of_one_file_of_several_and_of_many(tmp_path, copies, rows, is_mapped):
    generator = numpy.random.default_rng(copies)
    with HDFWriter(tmp_path / "a.hdf") as writer:
        for number in range(20):
            frames, labels = generator.integers(0, 9, 2)
            text = {} if is_mapped else {"text": numpy.array([f"{number}"] * (number % 3 + 1))}
            writer.add(
                f"{number}",
                {"data": numpy.full((frames, 40 if copies == 1 else 4), number), "classes": numpy.arange(labels), **text},
            )
    dataset = open_hdf([tmp_path / "a.hdf"] * copies)
    assert dataset.memory_mapped == {"data", "classes"}
    indices = generator.permutation(20 * copies)[:rows] if copies > 1 else generator.integers(0, 20, rows)
    both = concatenate("train", {"one": dataset, "other": dataset})
    for whole, wanted in ((dataset, indices), (both, numpy.append(indices, indices[:9] + 20 * copies))):
        batch = whole.padded(wanted)
        for key in whole.streams:
            for make, read in ((pad, batch), (pack, whole.packed(wanted, [key]))):
                expected = make([whole.sequence(index)[key] for index in wanted.tolist()])
                assert numpy.array_equal(read[key].values, expected.values)
                assert numpy.array_equal(read[key].seq_lens, expected.seq_lens)
