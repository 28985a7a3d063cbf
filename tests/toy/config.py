"""A small config for the tests on several ranks. Tests set what differs between them with ++key value."""

# ruff: noqa: F821  `config` is defined while hvdtrain runs this file
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.utils.checkpoint
from torch import nn

import hvdtrain

corpus = Path(config.value("corpus", "."))
train = {"files": str(corpus / config.value("part", "train.hdf")), "seq_ordering": config.value("ordering", "random")}
train["partition_epoch"] = config.int("parts", 1)
dev = {"files": str(corpus / "dev.hdf")} if config.bool("evaluated", False) else None

num_epochs = 1
max_seqs = 12 // hvdtrain.size()
num_threads = 1
log_interval = 0
log_verbosity = 5
learning_rate = 0.01
optimizer = {"class": "sgd", "momentum": 0.9}

layers = config.value("layers", "plain")
losses = config.value("losses", "sum")
fault, fault_rank, *fault_steps = config.list("fault", ["", -1, -1])
record = config.value("record")
tracked = config.value("tracked")
pace, slow_rank = config.list(
    "slow", ["", -1]
)  # what takes 0.1 s per batch on every rank, and the rank on which it takes 30 % longer


class Plain(nn.Module):
    """One convolution, a parameter that never gets a gradient and a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(4, 8, 3, padding=1)
        self.last = nn.Linear(8, 5)
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, frames, mask):
        return self.last(self.first(frames.transpose(1, 2)).transpose(1, 2).relu())


class WithStatistics(Plain):
    """The same model with BatchNorm (floating-point buffers and an integer one) and dropout."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, frames, mask):
        return super().forward(self.dropout(self.norm(frames.transpose(1, 2)).transpose(1, 2)), mask)


class Reused(Plain):
    """With a layer that is computed three times, each time again in backward, which then adds to its gradient three times."""

    def __init__(self):
        super().__init__()
        self.middle = nn.Linear(8, 8)

    def forward(self, frames, mask):
        hidden = self.first(frames.transpose(1, 2)).transpose(1, 2).relu()
        for _ in range(3):
            hidden = torch.utils.checkpoint.checkpoint(lambda values: self.middle(values).tanh(), hidden, use_reentrant=True)
        return self.last(hidden)


MODELS = {
    "plain": Plain,
    "reused": Reused,
    "statistics": WithStatistics,
    "only_statistics": lambda: WithStatistics(dropout=0.0),
}


def get_model(**_):
    torch.manual_seed(1 + hvdtrain.rank())  # rank 0's weights have to be broadcast
    if layers == "threads":
        return nn.DataParallel(Plain())
    return MODELS[layers]()


def train_step(*, model, extern_data, **_):
    context = hvdtrain.get_run_ctx()
    if context.train_flag:
        note(context.epoch, extern_data["id"])
        if hvdtrain.rank() == int(fault_rank) and context.step in map(int, fault_steps):
            if fault != "once" or not Path(f"{record}.fault").exists():
                fail()
        dawdle("compute", 0.1)
    data, classes = extern_data["data"], extern_data["classes"]
    scores = model(data.raw_tensor, data.mask)[data.mask]
    targets = classes.raw_tensor[classes.mask].long()
    entropies = nn.functional.cross_entropy(scores, targets, reduction="none")
    if fault == "nan" and context.train_flag and hvdtrain.rank() == int(fault_rank) and context.step in map(int, fault_steps):
        entropies = entropies * float("nan")
    if (
        fault == "overflow"
        and context.train_flag
        and hvdtrain.rank() == int(fault_rank)
        and context.step in map(int, fault_steps)
    ):
        entropies = entropies * 1e9  # finite, but its gradient overflows in float16
    context.mark_as_loss(entropies, "ce", use_normalized_loss=losses != "sum", seq_lens=classes.seq_lens)
    if losses == "several":
        energy = scores.square().sum(-1)[targets > 2]  # has its own count, which may be zero in a batch
        context.mark_as_loss(energy, "energy", scale=0.1, use_normalized_loss=True)
        context.mark_as_loss(scores[:, 0].square(), "first", scale=0.001)
    context.mark_as_loss(scores.argmax(-1) != targets, "fer", as_error=True, seq_lens=classes.seq_lens)
    if fault == "no_score" and not context.train_flag:
        quality = float("nan") if context.epoch in map(int, fault_steps) else 1.0 / context.epoch
        context.mark_as_loss(torch.full((1,), quality), "quality_error", as_error=True)


def track_epoch(*, epoch, step, metrics, **_):
    if tracked:
        with open(tracked, "a") as file:
            file.write(json.dumps({"epoch": epoch, "step": step, "metrics": metrics}) + "\n")


class Noted:
    """Counts this rank's steps. Where they are `finish_at`, the last rank asks for the end of the training."""

    def __init__(self, path, finish_at):
        self.path, self.finish_at, self.steps = path, finish_at, 0

    def on_step_end(self, training):
        self.steps += 1
        if training.rank == training.size - 1 and self.steps == self.finish_at:
            training.finish("the last rank wants it")

    def on_stop(self, training):
        total = hvdtrain.all_reduce(self.steps)
        with open(f"{self.path}.{training.rank}", "a") as file:
            file.write(json.dumps([training.epoch, self.steps, total, training.stopped_by]) + "\n")


class NotedOnRankZero(Noted):
    rank_zero_only = True

    def on_stop(self, training):
        with open(f"{self.path}.zero.{training.rank}", "a") as file:
            file.write(f"{self.steps}\n")


class NotedTracker:
    def begin(self, run):
        with open(f"{noted}.tracked.{hvdtrain.rank()}", "a") as file:
            file.write(f"{len(run.start.hosts)}\n")


class Breaks:
    def on_step_end(self, training):
        if fault == "callback" and training.rank == int(fault_rank) and training.step in map(int, fault_steps):
            Path(f"{record}.fault").write_text(str(time.time()))
            raise RuntimeError("planted in a callback")


noted, *finish_at = config.list("noted", [None])
trackers = NotedTracker if noted else None
callbacks = (
    [one(noted, int(finish_at[0])) for one in (Noted, NotedOnRankZero)] if noted else [Breaks] if fault == "callback" else []
)


due = {"at": 0.0}


def dawdle(what, seconds):
    """Wait as long; the next wait makes up for one that took up to 50 ms too long, as on a busy machine."""
    if pace == what:
        due["at"] = max(due["at"], time.monotonic() - 0.05) + seconds * (1.3 if hvdtrain.rank() == int(slow_rank) else 1)
        time.sleep(max(0.0, due["at"] - time.monotonic()))


def read_slowly(sequence):
    dawdle("data", 0.1 / max_seqs)
    return sequence


if pace == "data":
    train = {"class": "MapDataset", "dataset": train, "map_seq": read_slowly}


def note(epoch, ids):
    """Record which sequences this rank trains on."""
    if record:
        with open(f"{record}.{hvdtrain.rank()}", "a") as file:
            file.writelines(f"{epoch} {number}\n" for number in ids.raw_tensor[:, 0].tolist())


def fail():
    if record:
        Path(f"{record}.fault").write_text(str(time.time()))
    if fault in ("raise", "once"):
        raise RuntimeError("planted by the test")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit0":
        os._exit(0)
    if fault == "cut":
        os.truncate(corpus / "train.hdf", 4096)
    if fault == "mistake":
        for _ in range(2):
            hvdtrain.get_run_ctx().mark_as_loss(torch.zeros(1), "twice")
    if fault == "hang":
        time.sleep(600)
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
