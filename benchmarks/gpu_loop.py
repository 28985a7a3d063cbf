#!/usr/bin/env python3
"""hvdtrain on one GPU against a hand-written loop that trains the same model on the same batches.

The model is acoustic-like (benchmarks/acoustic/gpu_config.py). The hand-written loop does not wait for the GPU either: it has a
DataLoader with a worker process and pinned memory, copies with non_blocking, and leaves losses on the device until the end of the
epoch. Its worker starts before the clock does. Both train two epochs per round, of which the second is measured, and must reach
the same loss.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import torch
from measuring import ROOT, machine

from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.data.feed import Feed
from hvdtrain.plugins.hdf_tools.writer import HDFWriter
from hvdtrain.run import train
from hvdtrain.settings import Settings, read_settings
from hvdtrain.start_up.data import open_feeds

CONFIG = ROOT / "benchmarks/acoustic/gpu_config.py"
CLASSES = 1000


def main() -> int:
    """Create the data, train in turns, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (cuda)")
    parser.add_argument("--sequences", type=int, default=6000, help="of about 500 frames per epoch (6000)")
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    parser.add_argument("--batch_size", type=int, default=40_000, help="frames (40,000)")
    parser.add_argument("--layers", type=int, default=12, help="(12)")
    parser.add_argument("--width", type=int, default=512, help="(512)")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32", help="(float32)")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu_loop: there is no CUDA device on this host, so nothing was measured (--device cpu runs the same on the CPU)")
        return 0
    device = torch.device(options.device)
    print(f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}, PyTorch {torch.__version__}; {machine()}")
    with tempfile.TemporaryDirectory() as name:
        write_frames(Path(name) / "acoustic.hdf", options.sequences)
        settings = read(Path(name), options)
        rates: dict[str, list[float]] = {"hvdtrain": [], "hand-written": []}
        shares = []
        for number in range(options.rounds + 1):  # the first warms up
            rate, share, loss = by_hvdtrain(settings, options.sequences)
            other_rate, other_loss = by_hand(settings, device, options)
            assert abs(loss - other_loss) < 1e-3 * abs(loss), f"losses {loss} and {other_loss}"
            if number or not options.rounds:
                rates["hvdtrain"].append(rate)
                rates["hand-written"].append(other_rate)
                shares.append(share)
    for what, found in rates.items():
        print(f"{what}: {statistics.median(found):,.1f} sequences/s")
    ratios = [one / other for one, other in zip(*rates.values(), strict=True)]
    print(f"hvdtrain relative to hand-written: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print(f"computing time of hvdtrain: {statistics.median(shares):.2%} (at least {min(shares):.2%}); loss {loss:.5f}")
    return 0


def write_frames(path: Path, sequences: int) -> None:
    """Sequences of 300 to 700 frames, and a class for every fourth frame."""
    generator = numpy.random.default_rng(0)
    with HDFWriter(path, dims={"classes": CLASSES}) as writer:
        for number in range(sequences):
            frames = int(generator.integers(300, 701))
            sequence = {
                "data": generator.standard_normal((frames, 80), dtype=numpy.float32),
                "classes": generator.integers(0, CLASSES, -(-frames // 4), dtype=numpy.int32),
            }
            writer.add(f"seq-{number}", sequence)


def read(folder: Path, options: argparse.Namespace) -> Settings:
    """The settings of hvdtrain; the hand-written loop takes the model and the batches from them."""
    keys = {name: str(getattr(options, name)) for name in ("device", "batch_size", "layers", "width")}
    more = {"folder": str(folder), "model": str(folder / "exp/model"), "log_verbosity": "0"}
    precision = {} if options.precision == "float32" else {"mixed_precision": options.precision}
    return read_settings([CONFIG], {**keys, **more, **precision})


def by_hvdtrain(settings: Settings, sequences: int) -> tuple[float, float, float]:
    """The second epoch's sequences per second, its share of computing time, and its loss."""
    folder = Path(settings.run.model).parent
    shutil.rmtree(folder, ignore_errors=True)
    train(settings)
    last = json.loads((folder / "scores.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return sequences / last["elapsed"], last["computing"], last["scores"]["train_loss_ce"]


class Batches(torch.utils.data.Dataset[dict[str, Any]]):
    """The batches of an epoch, as hvdtrain plans them."""

    def __init__(self, feed: Feed, epoch: int) -> None:
        self._dataset = feed.dataset.at_epoch(epoch)
        self._share = feed.rank_batches(feed.plan(epoch))

    def __len__(self) -> int:
        return len(self._share)

    def __getitem__(self, number: int) -> dict[str, Any]:
        batch = self._dataset.batch(self._share[number]).data
        tensors = {key: torch.from_numpy(batch[key].values) for key in ("data", "classes")}
        return {**tensors, "lengths": torch.from_numpy(batch["classes"].seq_lens)}


def by_hand(settings: Settings, device: torch.device, options: argparse.Namespace) -> tuple[float, float]:
    """The second epoch's sequences per second, and its loss."""
    [feed] = open_feeds(settings, SingleCommunicator())
    step: Any = settings.learner.train_step
    loss_by_frame = step.__globals__["loss_by_frame"]
    get_model: Any = settings.learner.get_model
    model = get_model().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.schedule.learning_rate)
    autocast = nullcontext() if options.precision == "float32" else torch.autocast(device.type, dtype=torch.bfloat16)
    on_gpu = device.type == "cuda"
    for epoch in (1, 2):
        ahead: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 8, "pin_memory": True} if on_gpu else {}
        batches = iter(torch.utils.data.DataLoader(Batches(feed, epoch), batch_size=None, **ahead))
        sums, counts = [], []
        began = time.perf_counter()
        for batch in batches:
            frames, classes, lengths = (batch[key].to(device, non_blocking=True) for key in ("data", "classes", "lengths"))
            mask = torch.arange(classes.shape[1], device=device)[None, :] < lengths[:, None]
            count = int(batch["lengths"].sum())
            with autocast:
                total = loss_by_frame(model, frames, classes, mask).sum()
            optimizer.zero_grad(set_to_none=True)
            (total / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            sums.append(total.detach())
            counts.append(count)
        loss = torch.stack(sums).double().sum().item() / sum(counts)  # waits for the GPU
        elapsed = time.perf_counter() - began
    feed.dataset.close()
    return options.sequences / elapsed, loss


if __name__ == "__main__":
    sys.exit(main())
