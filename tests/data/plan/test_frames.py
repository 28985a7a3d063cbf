"""Batches of frames: those that RETURNN cuts for networks that are not recurrent, without padding, and no frame is lost."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from launching import TOY, refused
from opened_data import Numbers
from returnn.datasets.basic import Dataset as ReturnnDataset
from returnn.engine.batch import Batch as ReturnnBatch
from returnn.engine.batch import batch_to_raw_dict
from returnn.tensor import TensorDict
from returnn.util import NumbersDict
from thread_ranks import on_ranks

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.describe import batch_lines, feed_lines
from hvdtrain.data.expected import expected_of
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.batch_keys import BatchKeys, Limits
from hvdtrain.data.plan.epoch import Plan, plan
from hvdtrain.data.plan.frames import cut_frames
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.data.types import Array, Batch, Stream
from hvdtrain.errors import DataError
from hvdtrain.plugins.prove.compare import checksum
from hvdtrain.plugins.shared_plans import planner
from hvdtrain.settings import read_settings
from hvdtrain.training.account import usage_of_indices, usage_of_plan
from hvdtrain.training.agreement import plan_together

LENGTHS = numpy.array([5, 0, 3, 9, 1, 0, 0, 7, 2, 20, 4, 6, 0], dtype=numpy.int32)
EXTERN_DATA = {"data": {"dim": 2}, "classes": {"dim": 10000, "sparse": True}}


def sequence_of(index: int, length: int) -> dict[str, Array]:
    """Frame t of sequence i is 100 * i + t."""
    numbers = 100 * index + numpy.arange(length, dtype=numpy.int32)
    return {"data": numpy.stack([numbers, -numbers], axis=1).astype(numpy.float32), "classes": numbers}


class Frames(Numbers):
    """Of `sequence_of`; more data keys have zeros."""

    def __init__(self, lengths: Array, **more: Array) -> None:
        super().__init__({"data": lengths, "classes": lengths, **more})
        self.streams["data"] = Stream(numpy.dtype("float32"), (2,), 2, False)

    def sequence(self, index: int) -> dict[str, Array]:
        return super().sequence(index) | sequence_of(index, int(self.lengths["data"][index]))


class Theirs(ReturnnDataset):  # type: ignore[misc]
    """The sequences of an epoch in order, as a dataset of RETURNN."""

    def __init__(self, lengths: Mapping[str, Array], indices: Array, **more: Any) -> None:
        super().__init__(**more)
        self._columns, self._indices = lengths, indices

    def is_less_than_num_seqs(self, n: int) -> bool:
        return n < len(self._indices)

    def get_seq_length(self, seq_idx: int) -> NumbersDict:
        return NumbersDict({name: int(column[self._indices[seq_idx]]) for name, column in self._columns.items()})

    def get_data(self, seq_idx: int, key: str) -> Array:
        return sequence_of(int(self._indices[seq_idx]), self.get_seq_length(seq_idx)["data"])[key]

    def get_tag(self, sorted_seq_idx: int) -> str:
        return f"seq-{self._indices[sorted_seq_idx]}"

    def load_seqs(self, start: int, end: int) -> None: ...

    def batches(self, **limits: Any) -> Iterator[ReturnnBatch]:
        found = self.generate_batches(recurrent_net=False, used_data_keys=set(self._columns), **limits)
        while found.has_more():
            [batch] = found.peek_next_n(1)
            yield batch
            found.advance(1)

    def pieces(self, batch: ReturnnBatch) -> list[list[int]]:
        """What a batch consists of: in all data keys the same, one piece after the other."""
        offset, made = 0, []
        for part in batch.seqs:
            [(start, stop)] = {(part.seq_start_frame[name], part.seq_end_frame[name]) for name in self._columns}
            assert {part.batch_frame_offset[name] for name in self._columns} == {offset}
            assert part.batch_slice == 0
            offset += stop - start
            made.append([int(self._indices[part.seq_idx]), start, stop])
        return made


def random_case(chance: random.Random) -> tuple[dict[str, Array], Array, dict[str, Any]]:
    """Lengths, an order and limits, in RETURNN's names."""
    size = chance.choice([1, 2, 3, 10, 60])
    longest = chance.choice([1, 3, 20, 200])
    column = numpy.array([chance.choice([0, 1, longest, chance.randint(0, longest)]) for _ in range(size)], dtype=numpy.int32)
    lengths = dict.fromkeys(("data", "classes", "more")[: chance.randint(1, 3)], column)
    indices = numpy.random.default_rng(chance.randrange(1000)).integers(0, size, chance.choice([size, 2 * size]))
    frames = chance.choice([1, 2, longest, chance.randint(1, 4 * longest), 10_000])
    limits = {"batch_size": chance.choice([frames, dict.fromkeys(lengths, frames)])}
    if chance.random() < 0.7:
        limits["max_seqs"] = chance.choice([-1, 1, 2, 3, 10, chance.randint(1, size)])
    return lengths, indices, limits


@pytest.mark.parametrize("seed", range(20))
def test_batches_are_those_of_returnn(seed: int) -> None:
    """RETURNN ends a batch one sequence after max_seqs, and ignores chunks."""
    chance = random.Random(seed)
    for _ in range(5):
        lengths, indices, limits = random_case(chance)
        theirs = Theirs(lengths, indices, **chance.choice([{}, {"chunking": "7:3"}]))
        most = limits.get("max_seqs", -1)
        pieces, bounds = cut_frames(lengths, indices, Limits(limits["batch_size"], None if most == -1 else most + 1))
        ours = [part.tolist() for part in numpy.split(pieces, bounds[1:-1])] if len(pieces) else []
        assert ours == [theirs.pieces(batch) for batch in theirs.batches(**limits)], (lengths, indices, limits)
        assert (pieces.dtype, bounds.dtype, bounds[0], bounds[-1]) == (numpy.int64, numpy.int64, 0, len(pieces))


def feed(rank: int = 0, size: int = 1, dataset: Dataset | None = None, order: OrderKeys | None = None, **keys: Any) -> Feed:
    batch_keys = BatchKeys(frame_batches=True, **{"batch_size": 8, **keys})
    return Feed("train", dataset or Frames(LENGTHS), order or OrderKeys(), batch_keys, rank, size)


def read(one: Feed, made: Plan, position: int = 0) -> list[Batch]:
    with one.read(one.rank_batches(made, position), 1) as batches:
        return list(batches)


@pytest.mark.parametrize("keys", [{}, {"max_seqs": 2}, {"batch_size": 1}, {"batch_size": 1000}], ids=str)
def test_arrays_are_those_that_returnns_network_gets(keys: dict[str, Any]) -> None:
    one = feed(**keys)
    theirs = Theirs(one.dataset.lengths, one.plan(1).order[:0, 0])
    theirs._indices = numpy.arange(len(LENGTHS))
    templates = TensorDict()
    templates.update(EXTERN_DATA, auto_convert=True)
    limits = {"batch_size": 8, **keys}
    expected = theirs.batches(**{name: value - (name == "max_seqs") for name, value in limits.items()})
    for batch, raw in zip(read(one, one.plan(1)), expected, strict=True):
        fed = batch_to_raw_dict(raw, dataset=theirs, extern_data=templates, data_keys=["data", "classes"])
        for name in ("data", "classes"):
            numpy.testing.assert_array_equal(batch.data[name].values, fed[name])
            numpy.testing.assert_array_equal(batch.data[name].seq_lens, fed[f"{name}_seq_lens"])
            assert batch.data[name].values.shape[:2] == (1, int(batch.data[name].seq_lens[0]))
        assert batch.seq_tags is not None
        assert batch.row_tags is None
        assert batch.seq_tags()[-1] == fed["seq_tag"][0]
        assert batch.joined is not None
        assert len(batch.joined) == len(batch.indices)


def frames_of(batches: list[Batch]) -> list[int]:
    return [number for batch in batches for number in batch.data["classes"].values[0].tolist()]


ALL_FRAMES = [100 * index + frame for index, length in enumerate(LENGTHS.tolist()) for frame in range(length)]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("keys", [{}, {"shuffle_batches": True}, {"balance_ranks": 2, "max_seqs": 3}], ids=str)
def test_ranks_together_have_every_frame_once_also_after_a_stop_on_other_ranks(size: int, keys: dict[str, Any]) -> None:
    order = OrderKeys(seq_ordering="random")
    feeds = [feed(rank, size, order=order, **keys) for rank in range(size)]
    [made, *others] = [one.plan(1) for one in feeds]
    assert {other.fingerprint for other in others} <= {made.fingerprint}
    shares = [read(one, made) for one in feeds]
    assert sorted(number for share in shares for number in frames_of(share)) == ALL_FRAMES
    used = sum(
        (usage_of_indices(1, batch.indices) for share in shares for batch in share), usage_of_indices(0, made.order[:0, 0])
    )
    assert used == usage_of_plan(feeds[0], made, 0, made.num_batches)
    for other_size in (1, 2, 3):
        done = [batch for rank, share in enumerate(shares) for batch in share[:1] if rank < made.num_batches]
        rest = [read(feed(rank, other_size, order=order, **keys), made, len(done)) for rank in range(other_size)]
        assert sorted([*frames_of(done), *(number for share in rest for number in frames_of(share))]) == ALL_FRAMES


def test_counts_and_padding_are_those_of_frames() -> None:
    one = feed()
    made = one.plan(1)
    frames = numpy.array([len(frames_of([batch])) for batch in read(one, made)])
    assert frames.tolist() == [8] * 7 + [1]
    lengths = one.lengths_in(1)
    assert made.padding(lengths) == {"data": 0.0, "classes": 0.0}
    for columns in (made.padded(lengths), made.longest(lengths)):
        assert {name: column.tolist() for name, column in columns.items()} == dict.fromkeys(lengths, frames.tolist())
    assert made.num_frames(lengths["data"], 2, 5) == 24
    assert one.sequences_among(made.order) == int((LENGTHS > 0).sum())
    assert made.with_batches(numpy.array([7, 0, 0])).padded(lengths)["data"].tolist() == [1, 8, 8]
    assert (4, "train: batches of frames: sequences are joined and cut at batch_size") in feed_lines(one)
    assert not any("each makes a batch by itself" in line for _, line in feed_lines(one))
    assert batch_lines(one.batch_keys, 1, 2)[0] == (4, "batch, at most: 8 frames per rank, 16 in all")


def test_a_sequence_in_several_batches_in_a_row_is_read_once() -> None:
    one = feed()
    read(one, one.plan(1))
    assert isinstance(one.dataset, Frames)
    assert one.dataset.reads == [index for index, length in enumerate(LENGTHS.tolist()) if length]


def test_a_large_plan_is_made_once_per_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "WORTHWHILE", 1)
    found = on_ranks(3, lambda comm: plan_together(comm, feed(comm.rank, comm.size), 1))
    alone = feed().plan(1)
    for made in found:
        assert not made.order.flags.owndata
        numpy.testing.assert_array_equal(made.order, alone.order)
        assert made.fingerprint == alone.fingerprint
    assert feed().inputs(1).checksum() != replace(feed(), batch_keys=BatchKeys(batch_size=8)).inputs(1).checksum()


def test_the_checksum_of_a_step_does_not_depend_on_where_batches_end_if_sequences_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prove` deals the pieces of a step to other numbers of ranks."""
    one = feed(batch_size=1000)
    whole, parts = one.plan(1), Plan(one.plan(1).order, numpy.array([0, 2, 5, 9]))
    sums = [sum(checksum(batch) for batch in read(one, made)) for made in (whole, parts)]
    assert sums[0] == sums[1]


def test_the_smallest_limit_of_a_data_key_holds_for_all() -> None:
    """Where RETURNN cuts every data key at its own limit, frames and their classes no longer belong together."""
    lengths = {"data": LENGTHS, "classes": LENGTHS}
    by_key, single = (cut_frames(lengths, numpy.arange(13), Limits(limit)) for limit in ({"data": 9, "classes": 7}, 7))
    for one, other in zip(by_key, single, strict=True):
        numpy.testing.assert_array_equal(one, other)
    without = cut_frames(lengths, numpy.arange(13), Limits(None, 3))[0]
    assert without[:3].tolist() == [[0, 0, 5], [2, 0, 3], [3, 0, 9]]
    nothing = plan({"data": LENGTHS[1:2]}, OrderKeys(), BatchKeys(batch_size=5, frame_batches=True), 1)
    assert (nothing.num_batches, nothing.padding({"data": LENGTHS})) == (0, {"data": 0.0})


def test_data_keys_of_other_lengths_are_refused_unless_extern_data_leaves_them_out() -> None:
    dataset = Frames(LENGTHS, text=numpy.arange(13, dtype=numpy.int32))
    one = feed(dataset=dataset)
    with pytest.raises(
        DataError, match="frame_batches: expected the same number of frames .* got 5 of 'data' and 0 of 'text' in se"
    ):
        one.plan(1)
    one = replace(one, expected=expected_of(EXTERN_DATA)[0])
    batches = read(one, one.plan(1))
    assert list(batches[0].data) == ["data", "classes"]
    assert frames_of(batches) == ALL_FRAMES
    assert any(line.endswith("without 'text', which extern_data does not name") for _, line in feed_lines(one))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"classes": numpy.zeros(8, numpy.int32)}, "train: sequence 'seq-3', data key 'classes': expected 9 frames, .* got 8"),
        (
            {"data": numpy.zeros((9, 3), numpy.float32)},
            r"train: sequence 'seq-3', data key 'data': expected float32 of shape \(2,\)",
        ),
        ({"data": numpy.full((9, 2), 0.5, numpy.complex64)}, "seq-3', data key 'data': expected float32 .* got complex64"),
        (
            {"classes": numpy.arange(9, dtype=numpy.int32) + 9995},
            "train: sequence 'seq-3', .* 0 to 9999, .* got 10000 in frame 5",
        ),
    ],
    ids=["length", "shape", "type", "class"],
)
def test_faulty_sequences_are_refused_with_their_names(
    wrong: dict[str, Array], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Frames(LENGTHS)
    right = dataset.sequence
    monkeypatch.setattr(dataset, "sequence", lambda index: right(index) | (wrong if index == 3 else {}))
    one = replace(feed(dataset=dataset, batch_size=11), expected=expected_of(EXTERN_DATA)[0])
    with pytest.raises(DataError, match=message):
        read(one, one.plan(1))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"chunking": "5:5"}, "chunking: conflict"),
        ({"packed_batch_size": 50}, "packed_batch_size: conflict"),
        ({"frame_batches": "maybe"}, "frame_batches: wrong-type"),
    ],
)
def test_keys_that_do_not_fit(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    texts = {
        name: str(value)
        for name, value in {"corpus": tmp_path, "model": tmp_path / "m", "frame_batches": True, **overrides}.items()
    }
    with refused(message):
        read_settings([TOY], texts)


def test_evaluation_has_batches_of_frames_and_forward_whole_sequences() -> None:
    keys = BatchKeys(batch_size=9, frame_batches=True, shuffle_batches=True)
    assert keys.evaluation_keys().frame_batches
    assert not keys.evaluation_keys().whole_sequences().frame_batches
