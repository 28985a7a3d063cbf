"""Data of the config's own that goes wrong somewhere, in every form it may have: refused, or the training is the same."""

import json
import re
from functools import partial
from pathlib import Path

import numpy
import pytest
from fuzzing import cases, generator
from launching import hvdtrain
from opened_data import Numbers
from thread_ranks import on_ranks

from hvdtrain.comm.base import Communicator
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.errors import DataError
from hvdtrain.training.account import Account

CONFIG = """
import hvdtrain, json, numpy, torch

form, fault, place, times = config.list("case")
generator = numpy.random.default_rng(0)
sequences = [
    {
        "data": generator.normal(size=(length, 2)).astype("float32"),
        "classes": generator.integers(0, 4, length).astype("int32"),
    }
    for length in (3, 1, 4, 2, 5, 2, 3, 6, 1, 2)
]
calls = 0

def faulty(index, arrays):
    '''The arrays of a sequence; from its `times`-th reading on, those of sequence `place` have the fault.'''
    global calls
    arrays = dict(arrays)
    if index != int(place):
        return arrays
    calls += 1
    return spoilt(index, arrays) if calls > int(times) else arrays

def spoilt(index, arrays):
    data, classes = arrays["data"], arrays["classes"]
    if fault == "stop":
        next(iter(()))
    if fault == "raise":
        raise ValueError("broken")
    if fault == "index":
        return [][index]
    if fault == "key":
        return {}["no such key"]
    if fault == "exit":
        raise SystemExit(0)
    if fault == "none":
        return None
    return {
        "shorter": lambda: {"data": data[1:], "classes": classes[1:]},
        "longer": lambda: {"data": numpy.concatenate([data, data]), "classes": classes},
        "empty": lambda: {"data": data[:0], "classes": classes[:0]},
        "narrow": lambda: {"data": data[:, :1], "classes": classes},
        "wide": lambda: {"data": numpy.concatenate([data, data], 1), "classes": classes},
        "flat": lambda: {"data": data[:, 0], "classes": classes},
        "text": lambda: {"data": "words", "classes": classes},
        "lacking": lambda: {"data": data},
        "complex": lambda: {"data": data.astype("complex64"), "classes": classes},
        "real classes": lambda: {"data": data, "classes": classes + 0.5},
        "class beyond": lambda: {"data": data, "classes": classes + 4},
        "negative class": lambda: {"data": data, "classes": classes - 9},
        "huge class": lambda: {"data": data, "classes": classes.astype("int64") + 2**32},
        "another type": lambda: {"data": data.astype("float64"), "classes": classes.astype("int64")},
        "a list": lambda: {"data": data.tolist(), "classes": classes.tolist()},
    }[fault]()

class Items:
    def __len__(self):
        return len(sequences)
    def __getitem__(self, index):
        return faulty(index, sequences[index])

class WithLengths(Items):
    lengths = {key: [len(each[key]) for each in sequences] for key in ("data", "classes")}

def read():
    for index, arrays in enumerate(sequences):
        yield faulty(index, arrays)

def through_map():
    return map(faulty, range(len(sequences)), sequences)

class Stream:
    def __iter__(self):
        self.index = -1
        return iter(self.one, "end")
    def one(self):
        self.index += 1
        return "end" if self.index == len(sequences) else faulty(self.index, sequences[self.index])

class Corpus:
    def __init__(self):
        from hvdtrain.data.types import Stream
        self.streams = {"data": Stream(numpy.dtype("float32"), (2,), 2, False)}
        self.streams["classes"] = Stream(numpy.dtype("int32"), (), 4, True)
        self.lengths = {key: numpy.array([len(each[key]) for each in sequences], "int32") for key in self.streams}
        self.num_sequences = len(sequences)
    def sequence(self, index):
        return faulty(index, sequences[index])
    def tags(self, indices):
        return [f"seq-{index}" for index in indices]

def map_seq(arrays, *, index):
    return faulty(index, arrays)

plain = {"class": lambda: sequences}
train = {
    "items": {"class": Items},
    "items with lengths": {"class": WithLengths},
    "generator": {"class": read},
    "map": {"class": through_map},
    "iterator": {"class": Stream},
    "class": {"class": Corpus},
    "MapDataset": {"class": "MapDataset", "dataset": plain, "map_seq": map_seq},
    "workers": {"class": "MapDataset", "dataset": plain, "map_seq": map_seq, "num_workers": 2},
}[form]
max_seqs, num_epochs, num_threads, learning_rate, lengths_dir = 3, 2, 1, 0.1, None
extern_data = {"data": {"dim": 2}, "classes": {"dim": 4, "sparse": True}}

def get_model(**_):
    return torch.nn.Linear(2, 4)

def train_step(*, model, extern_data, **_):
    data, classes = extern_data["data"], extern_data["classes"]
    scores, targets = model(data.raw_tensor.float())[data.mask], classes.raw_tensor[classes.mask].long()
    hvdtrain.get_run_ctx().mark_as_loss(torch.nn.functional.cross_entropy(scores, targets, reduction="none"), "ce")
"""

FORMS = ("items", "items with lengths", "generator", "map", "iterator", "class", "MapDataset", "workers")

FOUND = ("items", "generator", "map", "iterator")
"""Those of which the lengths are found by reading."""

FAULTS = (
    *("stop", "raise", "index", "key", "exit", "none", "shorter", "longer", "empty", "narrow", "wide", "flat", "text", "lacking"),
    *("complex", "real classes", "class beyond", "negative class", "huge class", "another type", "a list"),
)


@pytest.mark.fuzz
def test_faults_of_data_of_the_configs_own(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(CONFIG)
    expected: dict[str, str | list[object]] = {}
    for number in range(cases(8)):
        numbers = generator("faults of data", number)
        form, fault = numbers.choice(FORMS), numbers.choice(FAULTS)
        if form in FOUND and fault in ("shorter", "longer", "empty"):
            continue  # the lengths are those that are found: this would be other data, not a fault
        place, times = numbers.randrange(10), numbers.choice([0, 0, 1, 2])
        if (form, fault, times) == ("iterator", "stop", 0):
            continue  # the end of the data by Python's own rule, the same in every epoch
        if form not in expected:
            expected[form] = outcome(tmp_path, f"{form} as it is", [form, "none", -1, 0])
            assert isinstance(expected[form], list), expected[form]
        label = f"case {number}: {form}, {fault} in sequence {place} after {times} times"
        got = outcome(tmp_path, f"{number}", [form, fault, place, times])
        # Of which form items are, the first one says: where it has the fault from the beginning, the config says otherwise.
        where = rf"\b(seq-)?{place}\b" + (r"|extern_data\." if place == 0 else "")
        is_refused = isinstance(got, str) and re.search(r"\btrain\b", got) and re.search(where, got)
        assert is_refused or got == expected[form], f"{label}: {got}"


def outcome(folder: Path, name: str, case: list[object]) -> str | list[object]:
    """The scores, or the error; of an exception of the config's own, what was added to its traceback."""
    finished = hvdtrain(folder / "config.py", {"model": folder / name / "model", "case": json.dumps(case)})
    if finished.status != 0:
        return finished.err
    return [json.loads(line)["scores"] for line in (folder / name / "scores.jsonl").read_text().splitlines()]


ORDERS = ("default", "sorted", "sorted_reverse", "random", "laplace:.5", "laplace:3", "random:3", "reverse")


@pytest.mark.fuzz
def test_random_plans_use_every_sequence_once_on_any_number_of_ranks() -> None:
    """In all parts of an epoch together, stopped anywhere and resumed on other numbers of ranks."""
    tried = 0
    for number in range(cases(40)):
        numbers = generator("plans", number)
        lengths = [numbers.randrange(1, 30) for _ in range(numbers.randrange(1, 80))]
        dataset = Numbers({"data": numpy.array(lengths, dtype=numpy.int32)})
        parts = numbers.choice([1, 1, 2, 5])
        order = OrderKeys(seq_ordering=numbers.choice(ORDERS), partition_epoch=parts, random_seed_offset=numbers.randrange(3))
        batches = BatchKeys(
            max_seqs=numbers.choice([1, 3, 10]),
            batch_size=numbers.choice([None, 30, 100, {"data": 45}]),
            shuffle_batches=numbers.random() < 0.3,
            max_pad_size=numbers.choice([None, 10]),
        )
        used: list[int] = []
        for epoch in range(1, parts + 1):
            position = 0
            for _ in range(numbers.choice([1, 2, 3])):  # stops in between
                size, steps = numbers.randrange(1, 4), numbers.randrange(4)
                found = on_ranks(size, partial(part, dataset, order, batches, epoch, position, steps))
                if isinstance(found[0], str):
                    assert "partition_epoch: expected at most" in found[0], found[0]
                    break
                used += [index for indices, _ in found for index in indices]
                position = found[0][1]
            else:
                found = on_ranks(2, partial(part, dataset, order, batches, epoch, position, 10**6))
                used += [index for indices, _ in found for index in indices]
                continue
            break
        else:
            tried += 1
            assert sorted(used) == list(range(dataset.num_sequences)), f"case {number}: {order}, {batches}"
    assert tried


def part(
    dataset: Numbers, order: OrderKeys, batches: BatchKeys, epoch: int, position: int, steps: int, comm: Communicator
) -> tuple[list[int], int] | str:
    """What a rank uses of an epoch in some steps from a position on, and the position after them; or the plan's error."""
    feed = Feed("train", dataset, order, batches, comm.rank, comm.size)
    try:
        plan = feed.plan(epoch)
    except DataError as error:
        return str(error)
    account, indices = Account(feed, plan, position), []
    for batch in list(feed.rank_batches(plan, position))[:steps]:
        account.add(batch)
        indices += batch.tolist()
    after = min(plan.num_batches, position + steps * comm.size)
    account.check(f"epoch {epoch}", comm.gather(account.take(after), name="used"))
    return indices, after
