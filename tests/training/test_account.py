"""Every sequence of the plan is trained on, evaluated and forwarded, or the program ends with a message."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from launching import TOY, Finished, hvdtrain
from thread_ranks import on_ranks

from hvdtrain.comm.base import Communicator
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.epoch import BatchKeys, Plan
from hvdtrain.data.plan.order import OrderKeys
from hvdtrain.errors import DataError
from hvdtrain.training.account import Account

CONFIG = """
import hvdtrain, itertools, numpy, torch

class Items(list):
    pass

sequences = Items(numpy.full((length, 2), length, "float32") for length in range(1, 41))
batching, max_seqs, num_epochs, num_threads, learning_rate = "random", 4, 2, 1, 0.1
train = dev = sequences
LINES

def get_model(**_):
    return torch.nn.Linear(2, 1)

def train_step(*, model, extern_data, **_):
    data = extern_data["data"]
    hvdtrain.get_run_ctx().mark_as_loss(model(data.raw_tensor)[data.mask].abs(), "size")

def forward_step(*, model, extern_data, **_):
    data = extern_data["data"]
    hvdtrain.get_run_ctx().mark_as_output(model(data.raw_tensor), "output", seq_lens=data.seq_lens)
"""

IN_MAP_SEQ = """
noise = iter(numpy.ones((25, 1, 2), "float32"))
def map_seq(arrays):
    return {"data": arrays["data"] + next(noise)}
train = {"class": "MapDataset", "dataset": {"class": lambda: sequences}, "map_seq": map_seq, "num_workers": WORKERS}
"""

IN_AN_ITEM = """
class Noisy(Items):
    noise = iter(numpy.ones((60, 1, 2), "float32"))
    lengths = numpy.arange(1, 41)
    def __getitem__(self, index):
        return super().__getitem__(index) + next(self.noise)
"""

OF_A_CLASS = """
class Corpus:
    def __init__(self):
        from hvdtrain.data.types import Stream
        self.streams = {"data": Stream(numpy.dtype("float32"), (2,), 2, False)}
        self.lengths, self.num_sequences = {"data": numpy.arange(1, 41, dtype="int32")}, 40
        self.noise = iter(range(25))
    def sequence(self, index):
        next(self.noise)
        return {"data": sequences[index]}
    def tags(self, indices):
        return [f"tag-{index}" for index in indices]
train = {"class": Corpus}
"""

IN_MAP = """
noise = iter(range(20))
def add(sequence):
    return sequence + next(noise)
def read():
    return map(add, sequences)
train = {"class": read}
"""

FAULTS: dict[str, tuple[str, str]] = {
    "map_seq": (IN_MAP_SEQ.replace("WORKERS", "0"), r"train\.map_seq, sequence \d+"),
    "map_seq in workers": (IN_MAP_SEQ.replace("WORKERS", "2"), r"train\.map_seq, sequence \d+"),
    "an item": (IN_AN_ITEM + "train = Noisy(sequences)\n", r"train, item \d+"),
    "an item of dev": (IN_AN_ITEM + "dev = Noisy(sequences)\n", r"dev, item \d+"),
    "a class with sequence()": (OF_A_CLASS, r"train, sequences \d+, \d+, \d+, \d+"),
    "a function that map calls": (IN_MAP, r"train: item \d+ of epoch \d of read"),
}


def run(folder: Path, lines: str, **overrides: object) -> Finished:
    (folder / "config.py").write_text(CONFIG.replace("LINES", lines))
    return hvdtrain(folder / "config.py", {"model": folder / "model", "lengths_dir": folder / "lengths", **overrides})


@pytest.mark.parametrize("fault", FAULTS)
def test_an_iterator_of_the_users_that_ends_is_not_the_end_of_the_data(fault: str, tmp_path: Path) -> None:
    lines, where = FAULTS[fault]
    finished = run(tmp_path, lines)
    assert finished.status == 2, finished.out

    assert re.search(where + r": expected data, got a StopIteration in .*config\.py, line \d+", finished.err), finished.err
    assert not list(tmp_path.glob("model.002*"))


@pytest.mark.slow
def test_the_same_on_two_ranks(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(f"""
import hvdtrain
# Reads the keys corpus and evaluated.
exec(open({str(TOY)!r}).read())
noise = iter(range(40 if hvdtrain.rank() == 1 else 10000))
def map_seq(arrays):
    next(noise)
    return arrays
train = {{"class": "MapDataset", "dataset": train, "map_seq": map_seq}}
""")
    overrides = {"corpus": corpus, "model": tmp_path / "model", "use_horovod": 1}
    finished = hvdtrain(tmp_path / "config.py", overrides, ranks=2)
    assert finished.status == 2, finished.err
    assert "expected data, got a StopIteration" in finished.err
    assert not list(tmp_path.glob("model.001*"))


def test_an_iterator_that_ends_itself_is_the_end_of_the_data(tmp_path: Path) -> None:
    lines = """
class Stream:
    def __iter__(self):
        self.inner = iter(sequences)
        return Once(self.inner)
class Once:
    def __init__(self, inner): self.inner = inner
    def __iter__(self): return self
    def __next__(self): return next(self.inner)
train, dev = Stream(), {"class": lambda: map(abs, sequences)}
"""
    finished = run(tmp_path, lines)
    assert finished.status == 0, finished.err
    reports = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [report["num_sequences"] for report in reports] == [40, 40]


LOSES: dict[str, str] = {
    "train": "train, epoch 1: expected the 40 sequences in 10 batches of the plan, got 36 sequences in 9 batches",
    "dev": "dev, evaluation of epoch 1: expected the 40 sequences in 10 batches of the plan, got 36 sequences in 9 batches",
}


@pytest.mark.parametrize("name", LOSES)
def test_batches_that_are_lost_on_the_way_are_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever loses them: here, a feed that ends before its last batch."""
    complete = Feed.read

    def read(self: Feed, share: list[numpy.ndarray], *arguments: object) -> object:
        return complete(self, share[:-1] if self.name == name else share, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Feed, "read", read)
    finished = run(tmp_path, "")
    assert finished.status == 2, finished.out
    assert LOSES[name] in finished.err
    assert not list(tmp_path.glob("model.001*"))


def test_batches_that_forward_loses_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, "", num_epochs=1).status == 0
    complete = Feed.read

    def read(self: Feed, share: list[numpy.ndarray], *arguments: object) -> object:
        return complete(self, share[:-1], *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Feed, "read", read)
    finished = run(tmp_path, "forward_data = sequences", task="forward", output_file=tmp_path / "out.hdf")
    assert finished.status == 2
    assert "forward_data, forward: expected the 40 sequences in 10 batches of the plan, got 36 sequences" in finished.err
    assert not (tmp_path / "out.hdf").exists()


PLAN = Plan(numpy.arange(10), numpy.array([0, 3, 6, 9, 10]))


def feed_of(comm: Communicator, distribution: str = "shard") -> Feed:
    return Feed("train", None, OrderKeys(), BatchKeys(), comm.rank, comm.size, distribution)  # type: ignore[arg-type]


TAKES: dict[str, tuple[Callable[[int], list[int]], str | None]] = {
    "what was planned": (lambda rank: [rank, rank + 2], None),
    "a batch less": (lambda rank: [rank] if rank else [0, 2], "got 9 sequences in 3 batches by all ranks together"),
    "one batch twice, another never": (lambda rank: [0, 2], "but not the same ones"),
}


@pytest.mark.parametrize("takes", TAKES)
def test_what_two_ranks_use_is_compared_with_their_plan(takes: str) -> None:
    of_rank, message = TAKES[takes]

    def work(comm: Communicator) -> str | None:
        account = Account(feed_of(comm), PLAN)
        for number in of_rank(comm.rank):
            # "one batch twice": rank 1 reads the batches of rank 0, of 3 sequences and of 3, for its own of 3 and of 1
            account.add(
                PLAN.batch(number) if message != "but not the same ones" or number != 2 or not comm.rank else PLAN.batch(3)
            )
        try:
            account.check("epoch 1", comm.gather(account.take(4), name="used"))
        except DataError as error:
            return str(error)
        return None

    for got in on_ranks(2, work):
        assert (got is None) if message is None else message in str(got)


def test_ranks_with_separate_plans() -> None:
    def work(comm: Communicator) -> str | None:
        account = Account(feed_of(comm, "random_seed_offset"), PLAN, position=1)
        for number in [1, 2] if comm.rank else [1, 2, 3]:
            account.add(PLAN.batch(number))
        try:
            account.check("epoch 1", comm.gather(account.take(4), name="used"))
        except DataError as error:
            return str(error)
        return None

    [first, second] = on_ranks(2, work)
    assert first == second
    assert "expected the 7 sequences in 3 batches of the plan, got 6 sequences in 2 batches by rank 1" in str(first)


def test_a_rank_that_has_fewer_batches_than_another_with_a_plan_of_its_own() -> None:
    def work(comm: Communicator) -> None:
        account = Account(feed_of(comm, "random_seed_offset"), PLAN)
        for number in range(PLAN.num_batches):
            account.add(PLAN.batch(number))
        for more in (1, 2):
            account.check("epoch 1", [account.take(PLAN.num_batches + more)])

    on_ranks(1, work)


def scores_in(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line)["scores"] for line in (folder / "scores.jsonl").read_text().splitlines()]


def test_an_iterable_that_has_grown_since_its_lengths_were_found(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("1\n2\n3\n")
    lines = f"""
def read():
    for line in open("".join([{str(tmp_path / "li")!r}, "nes"])):  # whose state would count if it were named in one piece
        yield numpy.ones((int(line), 2), "float32")
train = {{"class": read}}
"""
    assert run(tmp_path, lines, num_epochs=1).status == 0
    with (tmp_path / "lines").open("a") as file:
        file.write("4\n")
    finished = run(tmp_path, lines, num_epochs=2)
    assert finished.status == 2, finished.out
    assert "train: expected read to end after the 3 sequences that it had when their lengths were found" in finished.err
    assert "remove this file" in finished.err


def test_what_map_seq_changes_in_place_is_not_changed_for_good(tmp_path: Path) -> None:
    mapped = """
def map_seq(arrays):
    CHANGE
    return arrays
train = {"class": "MapDataset", "dataset": {"class": lambda: sequences}, "map_seq": map_seq}
"""
    found = []
    for number, change in enumerate(["arrays['data'] = arrays['data'] + 1", "arrays['data'] += 1"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        finished = run(folder, mapped.replace("CHANGE", change))
        assert finished.status == 0, finished.err
        found.append(scores_in(folder))
    assert found[0] == found[1]


def test_a_file_that_is_listed_twice_and_a_score_without_a_value_are_reported(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(f"""
# Reads the keys corpus and evaluated.
exec(open({str(TOY)!r}).read())
train["files"] = [train["files"], str(corpus / "." / "train.hdf")]
step = train_step
def train_step(**given):
    step(**given)
    hvdtrain.get_run_ctx().mark_as_loss(torch.zeros(0), "rare", as_error=True)
""")
    overrides = {"corpus": corpus, "model": tmp_path / "model", "evaluated": True}
    finished = hvdtrain(tmp_path / "config.py", overrides)
    assert finished.status == 0, finished.err
    assert f"train: {corpus / 'train.hdf'} is in the list of files 2 times" in finished.out
    assert "dev: rare has no value in epoch 1: none of " in finished.out


def test_an_exit_of_the_users_code_is_not_the_end_of_the_training(tmp_path: Path) -> None:
    exits = """
import sys
train = {"class": "MapDataset", "dataset": {"class": lambda: sequences}, "map_seq": lambda arrays: sys.exit(0)}
"""
    finished = run(tmp_path, exits)
    assert finished.status == 1
    assert "SystemExit: 0" in finished.err
