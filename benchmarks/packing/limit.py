#!/usr/bin/env python3
"""What packed batches of the acoustic-like model could gain at most: CPU time of steps with the same frames, in turns.

    python benchmarks/packing/limit.py

`padded` and `packed` are those of benchmarks/packing/config.py. `equal lengths` has as many real frames in sequences of one
length, in PyTorch's own layers: what their kernels take if there is no padding. `products` are only the products of matrices of
an LSTM over the real frames, forward and backward, one for each time step and one for all frames where that is possible: what
no loop written by hand can go below.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from hvdtrain.plugins.packed.data import PackedData

sys.path.append(str(Path(__file__).resolve().parent.parent / "acoustic"))

from acoustic_model import CLASSES, FEATURES, Acoustic  # noqa: E402  # found through the line above

SEQUENCES = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="how often each batch is computed (default: %(default)s)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, generator = Acoustic(), numpy.random.default_rng(1)
    times: dict[str, list[float]] = {}
    batches = [numpy.exp(generator.normal(5.1, 0.22, SEQUENCES)).astype(int) + 4 for _ in range(4)]
    for number in range(rounds + 1):
        for lengths in batches:
            frames = torch.randn(int(lengths.sum()), FEATURES)
            for name, step in steps(model, frames, torch.tensor(lengths, dtype=torch.int32)).items():
                began = time.process_time()
                step()
                if number:  # after a first round
                    times.setdefault(name, []).append(time.process_time() - began)
    padded = statistics.median(times["padded"])
    for name, found in times.items():
        print(f"| {name} | {1e3 * statistics.median(found):.0f} ms | {padded / statistics.median(found):.2f} |")


def steps(model: Acoustic, frames: torch.Tensor, lengths: torch.Tensor) -> dict[str, Callable[[], None]]:
    """What is compared, for a batch."""
    whole = pad_sequence(list(torch.split(frames, lengths.tolist())), batch_first=True)
    same = len(frames) // SEQUENCES
    equal = frames[: same * SEQUENCES].view(SEQUENCES, same, -1)

    def packed() -> None:
        data = PackedData(frames, lengths, lengths)
        for layer in (model.first, model.second):
            data = data.conv1d(layer)
            data = data.with_values(functional.relu(data.raw_tensor))
        data = data.with_values(model.output(data.recurrent(model.recurrent)))
        learn(data.padded(), data.seq_lens)

    return {
        "padded": lambda: learn(model(whole), (lengths + 3) // 4),
        "packed": packed,
        "equal lengths": lambda: learn(model(equal), torch.full((SEQUENCES,), (same + 3) // 4)),
        "products": lambda: products(model.recurrent, (lengths + 3) // 4),
    }


def learn(scores: torch.Tensor, lengths: torch.Tensor) -> None:
    """The gradients of CTC with a class for every 12 frames."""
    numbers = (lengths // 3).clamp(min=1)
    targets = torch.arange(int(numbers.sum())) % CLASSES
    by_time = scores.log_softmax(-1).transpose(0, 1)
    functional.ctc_loss(by_time, targets, lengths, numbers, CLASSES, zero_infinity=True).backward()


@torch.no_grad()
def products(layer: torch.nn.LSTM, lengths: torch.Tensor) -> None:
    """The products of matrices of a bidirectional LSTM with one row for each frame of its input."""
    count, sizes = int(lengths.sum()), [int((lengths > step).sum()) for step in range(int(lengths.max()))]
    for from_input, from_state in (weights[:2] for weights in layer.all_weights):
        inputs, gates = torch.ones(count, from_input.shape[1]), torch.ones(count, len(from_input))
        states, transposed = torch.ones(count, from_state.shape[1]), from_state.t().contiguous()
        inputs.mm(from_input.t())
        for size in sizes:
            states[:size].mm(transposed)
        for size in sizes:
            gates[:size].mm(from_state)
        gates.t().mm(inputs)
        gates.t().mm(states)
        gates.mm(from_input)


if __name__ == "__main__":
    main()
