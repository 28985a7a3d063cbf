"""The code that the two hand-written loops share: everything except the communication between ranks."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy
import torch
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from hvdtrain.config.source import load

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIGS = [ROOT / "configs/g2p.py", ROOT / "benchmarks/loops/config.py"]


@dataclass
class Options:
    """The command line of a loop.

    Attributes:
        data: the HDF file.
        batches: a .npy file of shape (ranks, epochs, steps, batch) with the indices of the sequences in every batch.
        reading: "h5py" reads a slice of the file for every sequence, "memory" reads the whole file at the start.
        channels: the width of the model.
    """

    data: Path
    batches: Path
    reading: str
    channels: int


def read_options() -> Options:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="A loop of benchmarks/training_loops.py, which starts it.")
    parser.add_argument("data", type=Path)
    parser.add_argument("batches", type=Path)
    parser.add_argument("--reading", choices=["h5py", "memory"], required=True)
    parser.add_argument("--channels", type=int, required=True)
    return Options(**vars(parser.parse_args()))


@dataclass
class Batch:
    """Padded letters and phones, shape (batch, time), with their lengths, shape (batch,)."""

    letters: torch.Tensor
    num_letters: torch.Tensor
    phones: torch.Tensor
    num_phones: torch.Tensor


class Words:
    """Reads batches from the HDF file."""

    def __init__(self, path: Path, reading: str) -> None:
        file = h5py.File(path, "r")
        ends = numpy.cumsum(file["seqLengths"][:], axis=0, dtype=numpy.int64)
        self._ends = ends.tolist()
        self._starts = [[0, 0], *self._ends[:-1]]
        self._letters, self._phones = file["inputs"], file["targets/data/classes"]
        if reading == "memory":
            self._letters, self._phones = self._letters[:], self._phones[:]

    def batch(self, indices: list[int]) -> Batch:
        """Read and pad some sequences."""
        places = [(self._starts[index], self._ends[index]) for index in indices]
        letters = [self._letters[start[0] : end[0]] for start, end in places]
        phones = [self._phones[start[1] : end[1]] for start, end in places]
        return Batch(*pad(letters), *pad(phones))


def pad(sequences: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad sequences with zeros to one tensor; returns it with their lengths."""
    lengths = [len(sequence) for sequence in sequences]
    padded = numpy.zeros((len(sequences), max(lengths)), dtype=sequences[0].dtype)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(padded), torch.tensor(lengths, dtype=torch.int32)


def read_batches(path: Path, rank: int) -> list[list[list[int]]]:
    """The indices of the sequences in every batch of a rank, by epoch and step."""
    return numpy.load(path)[rank].tolist()


def read_config(num_epochs: int, channels: int) -> dict[str, Any]:
    """The names that the config files define: get_model, learning_rate, ..."""
    return load(CONFIGS, {"num_epochs": str(num_epochs), "channels": str(channels)}, {}).values


def build_optimizer(config: dict[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW without weight decay for biases, embeddings and layer normalization."""
    options = {name: value for name, value in config["optimizer"].items() if name != "class"}
    kept = [
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if name == "bias" or isinstance(module, (torch.nn.LayerNorm, torch.nn.Embedding))
    ]
    ids = {id(parameter) for parameter in kept}
    decayed = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    return torch.optim.AdamW([{"params": decayed}, {"params": kept, "weight_decay": 0.0}], lr=config["learning_rate"], **options)


def build_schedule(config: dict[str, Any], optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    """The config's learning rate schedule, by step."""

    def factor(step: int) -> float:
        epochs_done = config["num_epochs"] * step / num_steps
        return config["dynamic_learning_rate"](epoch_continuous=epochs_done, learning_rate=1.0)

    return LambdaLR(optimizer, factor)


def mean_loss(config: dict[str, Any], model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The CTC loss of a batch, averaged over its words."""
    mask = torch.arange(batch.letters.shape[1])[None, :] < batch.num_letters[:, None]
    log_probs = model(batch.letters, mask)
    loss = functional.ctc_loss(
        log_probs.transpose(0, 1),
        batch.phones,
        batch.num_letters * config["UPSAMPLE"],
        batch.num_phones,
        blank=config["BLANK"],
        reduction="sum",
        zero_infinity=True,
    )
    return loss / len(batch.letters)


def report(rank: int, num_sequences: int, elapsed: float, cpu: float, loss: float) -> None:
    """Print the rate, the CPU seconds of all threads and the mean loss of a rank in the last epoch as a line of JSON."""
    rate = num_sequences / elapsed
    line = json.dumps({"rank": rank, "sequences_per_second": rate, "elapsed": elapsed, "cpu": cpu, "loss": loss})
    print(f"{line}\n", end="", flush=True)  # in one write, as the ranks print at the same time
