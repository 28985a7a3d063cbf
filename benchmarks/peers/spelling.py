"""What all trainers of benchmarks/peers share: the words, the model, and a record of what each process trained on.

No trainer knows of the record: the model itself writes it when it is called. The environment of compare.py says where the
words are and where the record goes; without it, a trainer takes the words of data/g2p and records nothing.
"""

from __future__ import annotations

import itertools
import os
import signal
import struct
import time
from pathlib import Path

import h5py
import numpy
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

ROOT = Path(__file__).resolve().parent.parent.parent
TRAIN = os.environ.get("PEERS_TRAIN", str(ROOT / "data/g2p/train.hdf"))
DEV = os.environ.get("PEERS_DEV", str(ROOT / "data/g2p/dev.hdf"))
FOLDER = os.environ.get("PEERS_FOLDER", str(ROOT / "exp/peers"))
"""Where a trainer puts its checkpoints."""
EPOCHS = int(os.environ.get("PEERS_EPOCHS", "2"))
WORLD_SIZE = int(os.environ.get("PEERS_RANKS", "1"))
BATCH = int(os.environ.get("PEERS_BATCH", "64")) // WORLD_SIZE
"""Words in the batch of a rank."""
SAVE_STEPS = int(os.environ.get("PEERS_SAVE_STEPS", "0"))
"""A checkpoint after every N steps, besides those after epochs; 0: none."""

RECORD = os.environ.get("PEERS_RECORD")
KILL_AT = int(os.environ.get("PEERS_KILL_AT", "0"))
"""SIGKILL as the N-th training step of the process begins, to see how a trainer resumes; 0: never."""

LETTERS = 27


class Words(torch.utils.data.Dataset[torch.Tensor]):
    """The words of an HDF file, each a tensor of class indices (letters,)."""

    def __init__(self, path: str) -> None:
        with h5py.File(path) as file:
            letters = torch.from_numpy(file["inputs"][:]).long()
            self.words = letters.split(file["seqLengths"][:, 0].tolist())

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.words[index]


def padded(words: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch for a DataLoader: letters (batch, time), and the lengths (batch,)."""
    return pad_sequence(words, batch_first=True), torch.tensor([len(word) for word in words])


def in_order(words: Words) -> torch.utils.data.DistributedSampler[torch.Tensor] | None:
    """For a trainer that would shuffle the words on several ranks, which the others do not in the comparison."""
    if WORLD_SIZE == 1:
        return None
    return torch.utils.data.DistributedSampler(words, WORLD_SIZE, int(os.environ["RANK"]), shuffle=False)


class NextLetter(nn.Module):
    """A letter-level language model. The same weights in every process and with every trainer."""

    def __init__(self, embedding: int = 64, width: int = 256) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(LETTERS, embedding)
        self.lstm = nn.LSTM(embedding, width, batch_first=True)
        self.output = nn.Linear(width, LETTERS)
        self.record = Record(self) if RECORD else None

    def forward(self, letters: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """The cross entropy of every letter after the first of each word of letters (batch, time), as (number of letters,)."""
        if self.record:
            self.record.add(letters, seq_lens, self.training)
        scores = self.output(self.lstm(self.embedding(letters))[0])[:, :-1]
        real = torch.arange(1, letters.shape[1], device=letters.device) < seq_lens.to(letters.device)[:, None]
        return nn.functional.cross_entropy(scores[real], letters[:, 1:][real].long(), reduction="none")


class Record:
    """Writes the time and the words of each call of the model, and its weights at the end of each epoch."""

    numbers = itertools.count(1)

    def __init__(self, model: NextLetter) -> None:
        self.model = [model]  # a list, so that it is no submodule
        self.file = None
        self.steps = 0
        self.trained = False

    def add(self, letters: torch.Tensor, seq_lens: torch.Tensor, training: bool) -> None:
        if self.file is None:  # in the process that trains, not in one that it was forked from
            self.file = open(Path(RECORD or "", f"{os.getpid()}.seen"), "ab", buffering=0)  # noqa: SIM115
        if training:
            self.steps += 1
            self.trained = True
        elif self.trained:
            self.trained = False
            torch.save(self.model[0].state_dict(), Path(RECORD or "", f"{os.getpid()}.{next(self.numbers)}.pt"))
        if self.steps == KILL_AT and training:
            os.kill(os.getpid(), signal.SIGKILL)
        lengths = seq_lens.numpy().astype(numpy.int32)
        head = struct.pack("d???xii", time.monotonic(), training, False, False, *letters.shape)
        self.file.write(head + lengths.tobytes() + letters.numpy().astype(numpy.int8).tobytes())
