#!/usr/bin/env python3
"""A training on thousands of ranks, of which one runs: `python benchmarks/simulate.py --ranks 64,1024,16384`.

For every number of ranks, the real program trains a tiny model for two epochs with a communicator that makes up the messages of
the other ranks: each gather returns as many values as there are ranks, from as many pickled messages, which differ where ranks
differ (hosts, batches left, seconds, what was used of the plan, contacts of watchdogs). First as rank 0, then as the first relay,
the busiest of the others, which gets the messages that rank 0 sent. Seconds are CPU seconds of that process, without making up
messages. The time that messages spend in the network is computed, from their number and size.

Then the real heartbeats of all ranks, in one process, with counted datagrams: while all is well, and when one rank hangs.
Last, how many questions the store of torch.distributed has to answer until all ranks have met.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hvdtrain.comm.base import SMALL_BUCKET  # noqa: E402
from hvdtrain.comm.torch_pickled import LENGTH, first_space  # noqa: E402
from hvdtrain.plugins.shared_plans.offers import Offer  # noqa: E402
from hvdtrain.plugins.watchdog.diagnosis import Diagnosis, Heartbeat
from hvdtrain.plugins.watchdog.heartbeats import Contact, Heartbeats
from hvdtrain.plugins.watchdog.peers import RankProcess  # noqa: E402
from hvdtrain.training.account import MODULUS, Usage  # noqa: E402  # found through the lines above

EPOCHS = 2
BATCH = 4
"""Sequences in a batch of a rank."""

PER_HOST = 8
"""Ranks of a host."""


@dataclass
class Traffic:
    """What one rank sends and receives.

    Attributes:
        messages: the number of messages that it sends.
        received: bytes.
        seconds: in the network, computed.
    """

    messages: int = 0
    received: int = 0
    seconds: float = 0.0
    latency: float = 20e-6
    bandwidth: float = 1.25e9

    def gather(self, lengths: Sequence[int]) -> None:
        """Count an all-gather of values of so many bytes, by doubling, as the transports do it: what is long comes second."""
        space = first_space(len(lengths))
        rest = [max(0, length - space) for length in lengths]
        rounds = math.ceil(math.log2(len(lengths))) * (2 if any(rest) else 1)
        num_bytes = len(lengths) * (LENGTH + space) + sum(rest)
        self.messages += rounds
        self.received += num_bytes
        self.seconds += rounds * self.latency + num_bytes / self.bandwidth

    def reduce(self, size: int, num_bytes: int) -> None:
        """Count an all-reduce: a reduce-scatter and an all-gather, both by doubling."""
        rounds = 2 * math.ceil(math.log2(size))
        self.messages += rounds
        self.received += 2 * num_bytes
        self.seconds += rounds * self.latency + 2 * num_bytes / self.bandwidth


class SimulatedCommunicator:
    """One rank of a job whose other ranks are made up.

    Args:
        of_rank_zero: the names and messages of rank 0's gathers, in order; None: this is rank 0.

    Attributes:
        sent_messages: the names and messages of this rank's gathers.
        marks: by name, CPU seconds until the beginning and the end of gathers of this name, without making up messages.
    """

    transport = "no network"

    def __init__(self, rank: int, size: int, traffic: Traffic, of_rank_zero: Sequence[tuple[str, bytes]] | None) -> None:
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = rank % PER_HOST, PER_HOST
        self.sent = 0
        self.gathers: Counter[str] = Counter()
        self.largest: Counter[str] = Counter()
        self.sent_messages: list[tuple[str, bytes]] = []
        self.marks: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._traffic = traffic
        self._made_up = 0.0
        self._of_rank_zero = of_rank_zero

    def now(self) -> float:
        """CPU seconds of this process without making up messages."""
        return time.process_time() - self._made_up

    def start(
        self, tensors: Sequence[Any], op: str, *, name: str, owners: Sequence[int] | None = None, narrow: str | None = None
    ) -> Any:
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        self.sent += num_bytes
        self._traffic.reduce(self.size, num_bytes)
        return list(tensors), op, name

    def finish(self, handle: Any) -> list[Any]:
        tensors, op, name = handle
        if name == "requests":  # the other ranks have none; the last ones are a number of rank 0, a checksum and its square
            return [self._requests(tensor) for tensor in tensors]
        return tensors if op == "average" else [tensor * self.size for tensor in tensors]

    def _requests(self, own: Any) -> Any:
        *counts, wanted, checksum, square = own.tolist()
        if self.rank:
            counts, wanted = [0.0] * len(counts), 1.0
        return own.new_tensor([*counts, wanted, checksum * self.size, square * self.size])

    def bucket_bytes(self, on_gpu: bool) -> int:
        return SMALL_BUCKET

    def broadcast(self, tensors: Sequence[Any], *, name: str) -> list[Any]:
        self._traffic.reduce(self.size, sum(tensor.nbytes for tensor in tensors) // 2)
        return list(tensors)

    def gather_rows(self, tensors: Sequence[Any], *, name: str, lengths: Any = None, narrow: Any = None) -> list[Any]:
        raise NotImplementedError("the simulated model has no sparse gradients")

    def gather(self, value: Any, *, name: str) -> list[Any]:
        began = self.now()
        own = pickle.dumps(value)
        wall = time.process_time()
        messages = self._messages(value, own, name)
        self._made_up += time.process_time() - wall
        values = [pickle.loads(message) for message in messages]
        num_bytes = sum(map(len, messages))
        self._traffic.gather([len(message) for message in messages])
        self.gathers[name] += 1
        self.largest[name] = max(self.largest[name], num_bytes)
        self.marks[name].append((began, self.now()))
        return values

    def _messages(self, value: Any, own: bytes, name: str) -> list[bytes]:
        """The messages of all ranks, each in memory of its own, as they arrive."""
        number = len(self.sent_messages)
        self.sent_messages.append((name, own))
        first = own
        if self._of_rank_zero is not None:
            of_rank_zero, first = self._of_rank_zero[number]
            if of_rank_zero != name:
                raise RuntimeError(f"rank {self.rank} calls {name}, but rank 0 called {of_rank_zero}")
            if name == "weights":  # gradients of other ranks are made up, so that weights are not those of rank 0
                own = first
            if name == "watchdog":  # on another host: its process has ended
                first = pickle.dumps(_as_of_rank(name, pickle.loads(first), 0, self.size))
        used = _used_by_others(name, value, pickle.loads(first), self.rank, self.size)
        messages = []
        for rank in range(self.size):
            if rank in (0, self.rank):
                messages.append(first if rank == 0 else own)
                continue
            other = _as_of_rank(name, value, rank, self.size) if used is None else used(rank)
            messages.append(bytes(bytearray(own)) if other is value else pickle.dumps(other))
        return messages

    def channel(self, name: str) -> SimulatedCommunicator:
        return self

    def close(self) -> None:
        pass


def _as_of_rank(name: str, value: Any, rank: int, size: int) -> Any:
    """What another rank sends where this one sends `value`."""
    host = f"node{rank // PER_HOST}"
    if name == "watchdog":
        if not isinstance(value, Contact):
            return f"{value}{host}"
        return replace(value, host=host, process=replace(value.process, place=value.process.place + host))
    if name == "hosts":
        return host, value[1]
    if name == "plan":
        return len(range(rank, value[2], size)), *value[1:]
    if name == "seconds":
        slower = 1 + random.Random(rank).random() / 50 + (rank == size // 3)
        return {activity: seconds * slower for activity, seconds in value[0].items()}, *value[1:]
    if name.startswith(("plan_", "map_plan_")):
        error, message = value
        offers = isinstance(message, Offer) or message == "waits"
        if not offers or rank % PER_HOST:
            return error, "waits" if offers else message
        return error, Offer(host, 1, 1, b"", 0, (0,), "int32", 0)
    if name == "rank_states":
        return value
    if isinstance(value, tuple) and len(value) == 2 and value[0] is None:  # of `on_rank_zero`: only rank 0 has a value
        return None, None
    return value


def _used_by_others(name: str, own: Any, of_rank_zero: Any, rank: int, size: int) -> Callable[[int], Any] | None:
    """Makes up what other ranks have used of a plan: one of them, all that is left of it."""
    if name != "train_scores" and not name.startswith("scores."):
        return None
    is_record = hasattr(own, "used")  # else a tuple, as in the evaluation, and in earlier versions
    place = 1 if name != "train_scores" else len(own) - 1 if not is_record else 0

    def entry(value: Any) -> tuple[Usage, Usage]:
        return value.used if is_record else value[place]

    used, planned = entry(of_rank_zero)
    if rank:
        used += entry(own)[0]
    rest = Usage(planned.batches - used.batches, planned.sequences - used.sequences, (planned.checksum - used.checksum) % MODULUS)
    one = next(other for other in range(1, size) if other != rank)

    def of(other: int) -> Any:
        theirs = (rest if other == one else Usage(), Usage())
        return replace(own, used=theirs) if is_record else (*own[:place], theirs, *own[place + 1 :])

    return of


SAVING = ("rank_states", "prepare_save", "save_own", "save", "finish_saving")


def train(size: int, rank: int, folder: Path, steps: int, traffic: Traffic) -> dict[str, Any]:
    """Train as one rank of a simulated job; return what it measured."""
    import torch
    from torch import nn

    import hvdtrain
    from hvdtrain import run
    from hvdtrain.settings import read_settings, with_datasets
    from hvdtrain.start_up.ranks import prepare

    def get_model(**_: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))

    def train_step(*, model: nn.Module, extern_data: Any, **_: Any) -> None:
        data, classes = extern_data["data"], extern_data["classes"]
        scores, targets = model(data.raw_tensor)[data.mask], classes.raw_tensor[data.mask].long()
        losses = nn.functional.cross_entropy(scores, targets, reduction="none")
        hvdtrain.get_run_ctx().mark_as_loss(losses, "ce", use_normalized_loss=True)

    def dummy(number: int) -> dict[str, Any]:
        return {"class": "DummyDataset", "input_dim": 8, "output_dim": 5, "num_seqs": number, "seq_len": 3}

    sequences = size * steps * BATCH
    config = {
        "get_model": get_model,
        "train_step": train_step,
        "train": {**dummy(sequences), "seq_ordering": "random"},
        "dev": dummy(max(BATCH, sequences // 10)),
        "max_seqs": BATCH,
        "num_epochs": EPOCHS,
        "num_threads": 1,
        "learning_rate": 0.01,
        "model": "model",  # the same path on all ranks, as these are compared
    }
    (folder / f"rank{rank}").mkdir(exist_ok=True)
    os.chdir(folder / f"rank{rank}")
    settings = with_datasets(read_settings([config], {}))
    prepare(settings)
    torch.manual_seed(1)
    record = folder / "rank0.pickle"
    comm = SimulatedCommunicator(rank, size, traffic, pickle.loads(record.read_bytes()) if rank else None)
    before = comm.now(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run.train(settings, comm)  # type: ignore[arg-type]  # a Communicator, but for the types of its tensors
    if rank == 0:
        record.write_bytes(pickle.dumps(comm.sent_messages))
    marks = comm.marks
    first_plan, second_plan = marks["plan_train"][:2]
    in_steps = [scores[0] - plan[1] for plan, scores in zip(marks["plan"], marks["train_scores"], strict=True)]
    saves = [(states[0], saved[1]) for states, saved in zip(marks["rank_states"], marks["save"], strict=True)]
    lines = (folder / "rank0" / "scores.jsonl").read_text().splitlines()
    return {
        "start": first_plan[0] - before[0],
        "epoch": second_plan[0] - first_plan[0] - in_steps[0] - (saves[0][1] - saves[0][0]),
        "step": in_steps[-1] / steps,
        "save": saves[0][1] - saves[0][0],
        "megabytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[1]) / 1024,
        "messages": traffic.messages,
        "received": traffic.received,
        "network": traffic.seconds,
        "gathers": dict(comm.gathers),
        "largest": dict(comm.largest.most_common(6)),
        "line": len(lines[-1]),
    }


class CountedDatagrams:
    """A socket of the simulation: it counts, and delivers at once."""

    def __init__(self, address: tuple[str, int], network: dict[tuple[str, int], CountedDatagrams]) -> None:
        self.address = self.host, self.port = address
        self.hosts: dict[str, Any] = {}
        self.refused: dict[tuple[str, int], float] = {}
        self.waiting: deque[tuple[bytes, tuple[str, int]]] = deque()
        self.received = self.num_bytes = 0
        self._network = network
        network[address] = self

    def send(self, data: bytes, address: tuple[str, int]) -> None:
        if data:
            self._network[address].waiting.append((data, self.address))

    def probe(self, address: tuple[str, int]) -> None:
        pass

    def receive(self, seconds: float) -> tuple[bytes, tuple[str, int]] | None:
        if not self.waiting:
            time.sleep(seconds)  # ends `listen`
            return None
        self.received += 1
        self.num_bytes += len(self.waiting[0][0])
        return self.waiting.popleft()

    def close(self) -> None:
        pass


@dataclass
class Load:
    """What heartbeats cost a rank in a second of training.

    Attributes:
        seconds: of CPU.
    """

    seconds: float = 0.0
    datagrams: float = 0.0
    num_bytes: float = 0.0


@dataclass
class WatchedJob:
    """The heartbeats of all ranks of a job."""

    size: int
    ranks: list[Heartbeats] = field(default_factory=list)

    def __post_init__(self) -> None:
        network: dict[tuple[str, int], CountedDatagrams] = {}
        own = RankProcess.of_pid(1)
        places = [(f"10.{rank >> 16}.{rank >> 8 & 255}.{rank & 255}", 9) for rank in range(self.size)]
        hosts = [f"node{rank // PER_HOST}" for rank in range(self.size)]
        contacts = [Contact(host, replace(own, place=host), (), 9, "token") for host in hosts]
        self.sockets = [CountedDatagrams(place, network) for place in places]
        for rank in range(self.size):
            made = Heartbeats(rank, contacts, self.sockets[rank], places[:1])  # type: ignore[arg-type]  # as a socket
            if getattr(made, "hub", 0):
                made.hub_addresses = places[made.hub : made.hub + 1]
            self.ranks.append(made)

    def round(self, beat: Callable[[int], Heartbeat], watched: Sequence[int], loads: dict[int, Load]) -> Diagnosis | None:
        """Let all ranks do what their watchdogs do once in an interval, the last ones first; return the diagnosis of rank 0."""
        found = None
        for rank in reversed(range(self.size)):
            made, began = self.ranks[rank], time.thread_time()
            before = self.sockets[rank].received, self.sockets[rank].num_bytes
            own = beat(rank)
            while self.sockets[rank].waiting:
                made._handle(*self.sockets[rank].receive(0.0))  # type: ignore[misc]  # there is one
            made.send(own)
            found = made.conclude(own) if rank == 0 or made.rank in watched else found
            if rank == 0:
                made.broadcast(found)
            if rank in watched:
                load = loads[rank]
                load.seconds += (time.thread_time() - began) / made.interval
                load.datagrams += (self.sockets[rank].received - before[0]) / made.interval
                load.num_bytes += (self.sockets[rank].num_bytes - before[1]) / made.interval
        return found


def heartbeats(size: int) -> dict[str, Any]:
    """The load of rank 0 and of the busiest other one, while all is well and when one rank hangs."""
    job = WatchedJob(size)
    other = next((rank for rank, made in enumerate(job.ranks) if rank and getattr(made, "_below", ())), 1)
    watched, rounds = (0, other), 3
    well = {rank: Load() for rank in watched}
    fine = Heartbeat("epoch 1, step 5", 0.1, 6, waits=False, overdue=False)
    job.round(lambda rank: fine, (), {})  # they meet
    job.round(lambda rank: fine, (), {})
    for _ in range(rounds):
        job.round(lambda rank: fine, watched, well)
    hanging, waits = size - 1, replace(fine, idle=70.0, waits=True, overdue=True)
    trouble = {rank: Load() for rank in watched}
    wanted, needed = Diagnosis((hanging,)), 0
    while job.round(lambda rank: replace(waits, waits=rank != hanging), watched, trouble) != wanted:
        needed += 1
        if needed > 20:
            raise RuntimeError(f"rank 0 of {size} has not found the rank that hangs")
    while job.ranks[hanging].conclude(replace(waits, waits=False)) != wanted:
        job.round(lambda rank: replace(waits, waits=rank != hanging), (), {})
    return {
        "interval": job.ranks[0].interval,
        "rounds": needed + 1,
        "well": [vars(well[rank]) | {"rounds": rounds} for rank in watched],
        "trouble": [vars(trouble[rank]) | {"rounds": needed + 1} for rank in watched],
        "other": other,
    }


class CountingStore:
    """A store of torch.distributed, in memory, that counts its questions."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.questions = 0
        self._lock = threading.Lock()

    @contextmanager
    def _question(self) -> Any:
        with self._lock:
            self.questions += 1
            yield

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        with self._question():
            if self.values.get(key, "") == expected:
                self.values[key] = wanted
            return self.values[key].encode()

    def add(self, key: str, amount: int) -> int:
        with self._question():
            self.values[key] = str(int(self.values.get(key, 0)) + amount)
            return int(self.values[key])

    def check(self, keys: Sequence[str]) -> bool:
        with self._question():
            return all(key in self.values for key in keys)

    def set(self, key: str, value: str) -> None:
        with self._question():
            self.values[key] = value

    def get(self, key: str) -> bytes:
        with self._question():
            return self.values[key].encode()


def questions(size: int, some: int = 16) -> int:
    """The number of questions to the store if all ranks come at once, from those of `some` ranks that find all others there."""
    from hvdtrain.comm.torch_rendezvous import _check_in

    store = CountingStore()
    store.compare_set("size", "", str(size))
    for rank in range(some, size):
        store.add(f"rank.{rank}", 1)
    store.values["present"] = str(size - some)
    store.questions = 0
    ranks = [threading.Thread(target=_check_in, args=(store, None, rank, size, time.monotonic() + 60)) for rank in range(some)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return store.questions * size // some


def measure(size: int, options: argparse.Namespace) -> None:
    """Simulate a number of ranks, each rank in a process of its own, and print what it measured."""
    common = [sys.executable, str(Path(__file__).resolve()), "--steps", str(options.steps)]
    common += ["--latency", str(options.latency), "--bandwidth", str(options.bandwidth)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in (0, busiest(size)):
            command = [*common, "--one", f"{size},{rank},{folder}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{size} ranks, rank {rank}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
            found.append(json.loads(done.stdout.splitlines()[-1]) | {"rank": rank})
    for one in found:
        print(
            f"| {size} | {one['rank']} | {one['start']:.2f} | {1000 * one['step']:.2f} | {one['epoch']:.2f} | {one['save']:.2f} "
            f"| {one['megabytes']:.0f} | {one['messages']} | {one['received'] / 1e6:.1f} | {one['network']:.2f} |",
            flush=True,
        )
    if options.verbose:
        largest = ", ".join(f"{name} {number / 1e6:.2f} MB" for name, number in found[0]["largest"].items())
        print(f"  the largest gathers of rank 0: {largest}; in all {sum(found[0]['gathers'].values())} gathers")
        print(f"  a line of scores.jsonl: {found[0]['line'] / 1e3:.1f} KB")


def busiest(size: int) -> int:
    """The first relay if there are relays, else the first rank of the second host."""
    try:
        from hvdtrain.plugins.watchdog.relays import Layout
    except ImportError:
        return PER_HOST
    layout = Layout.of(size)
    return layout.group if layout.has_relays else PER_HOST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,1024,16384", help="numbers of ranks, at least 16 each")
    parser.add_argument("--steps", type=int, default=20, help="steps of an epoch")
    parser.add_argument("--latency", type=float, default=20e-6, help="seconds that a message takes")
    parser.add_argument("--bandwidth", type=float, default=1.25e9, help="bytes per second of a rank")
    parser.add_argument("--parts", default="training,heartbeats,meeting", help="what to simulate")
    parser.add_argument("--verbose", action="store_true", help="also print which gathers are the largest")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # size, rank and folder, in a process of its own
    options = parser.parse_args()
    if options.one:
        size, rank, folder = options.one.split(",")
        traffic = Traffic(latency=options.latency, bandwidth=options.bandwidth)
        print(json.dumps(train(int(size), int(rank), Path(folder), options.steps, traffic)))
        return
    sizes = [int(size) for size in options.ranks.split(",")]
    if "training" in options.parts:
        print(f"A training of {EPOCHS} epochs of {options.steps} steps, each with an evaluation and a checkpoint; CPU seconds.")
        print_head("ranks, rank, start, ms/step, rest of an epoch, checkpoint, MB more, messages, MB, network")
        for size in sizes:
            measure(size, options)
    if "heartbeats" in options.parts:
        print("Heartbeats, per second of training.")
        print_head("ranks, seconds between, rank, CPU ms, datagrams, KB, CPU ms if one hangs, datagrams, KB, rounds to find it")
        for size in sizes:
            found = heartbeats(size)
            for rank, *loads in zip((0, found["other"]), found["well"], found["trouble"], strict=True):
                cells = [f"{size} | {found['interval']:.1f} | {rank}"]
                for load in loads:
                    seconds, datagrams, num_bytes = (
                        load[name] / load["rounds"] for name in ("seconds", "datagrams", "num_bytes")
                    )
                    cells.append(f"{seconds * 1000:.1f} | {datagrams:.0f} | {num_bytes / 1000:.1f}")
                print(f"| {' | '.join(cells)} | {found['rounds']} |", flush=True)
    if "meeting" in options.parts:
        print_head("ranks, questions to the store until all have met")
        for size in sizes:
            print(f"| {size} | {questions(size)} |", flush=True)


def print_head(columns: str) -> None:
    """Print the head of a table."""
    print(f"| {columns.replace(', ', ' | ')} |")
    print("|---" * (columns.count(", ") + 1) + "|")


if __name__ == "__main__":
    main()
