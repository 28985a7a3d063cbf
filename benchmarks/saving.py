#!/usr/bin/env python3
"""How long the steps wait for a checkpoint with Adam's state: written, or copied, so that it is written while they go on.

saving.py --millions 2 20 200
saving.py --backend tensorflow --millions 2 20

Of 200 M parameters, it needs 5 GB of memory and of the disk in --folder. In parentheses are this process's CPU seconds, on which
other programs have less influence.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from measuring import ROOT, machine

sys.path.insert(0, str(ROOT))

from hvdtrain.checkpoint.folder import CheckpointFolder  # noqa: E402  # found through the line above
from hvdtrain.learner.contents import CheckpointContents  # noqa: E402

PROGRESS = {"epoch": 1, "step": 1}

Contents = Callable[[], CheckpointContents]


def of_torch(millions: int) -> tuple[Contents, Contents]:
    """What returns the contents of a checkpoint, and what returns a copy of them."""
    import torch

    from hvdtrain.learner.torch.model_file import file_format
    from hvdtrain.plugins.background.writer import BackgroundWriter

    torch.set_num_threads(1)

    def matrices() -> dict[str, torch.Tensor]:
        return {str(number): torch.ones(1000, 1000) for number in range(millions)}

    optimizer = {"optimizer": {"exp_avg": matrices(), "exp_avg_sq": matrices()}}
    given = CheckpointContents(matrices(), optimizer, PROGRESS, file_format(torch.device("cpu"), "pt"))
    writer = BackgroundWriter()  # its process ends with this one
    return lambda: given, lambda: writer.copy(given)


def of_tensorflow(millions: int) -> tuple[Contents, Contents]:
    """The same."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras

    from hvdtrain.plugins.tensorflow.state import TensorFlowState
    from hvdtrain.plugins.tensorflow.tensors import variables_of

    layers = [keras.layers.Dense(1000, use_bias=False) for _ in range(millions)]
    model = keras.Sequential([keras.Input((1000,)), *layers])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    state = TensorFlowState(variables_of(model), optimizer, None, None)
    return lambda: state.contents(PROGRESS), lambda: state.copied(state.contents(PROGRESS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["torch", "tensorflow"], default="torch")
    parser.add_argument("--millions", type=int, nargs="+", default=[2, 20, 200], help="parameters of the models")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written to; default: the system's temporary folder")
    arguments = parser.parse_args()
    print(machine())
    print("| parameters | synchronous | in the background | of it | the first time |")
    print("|---|---|---|---|---|")
    for millions in arguments.millions:
        contents, copy = of_torch(millions) if arguments.backend == "torch" else of_tensorflow(millions)
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            folder = CheckpointFolder(Path(name) / "model", "pt" if arguments.backend == "torch" else "npz")
            writing, copying = [], []
            for number in range(arguments.rounds + 1):
                target = folder.new(number + 1)
                began, used = time.perf_counter(), time.process_time()
                folder.write(target, contents())
                writing.append((time.perf_counter() - began, time.process_time() - used))
                began, used = time.perf_counter(), time.process_time()
                copied = copy()
                copying.append((time.perf_counter() - began, time.process_time() - used))
                folder.write(target, copied)  # a training waits for this before it saves again
                folder.remove([target])
        sync, sync_cpu, stall, stall_cpu = (median(row[n] for row in rows[1:]) for rows in (writing, copying) for n in (0, 1))
        print(
            f"| {millions} M | {sync:.3f} s ({sync_cpu:.3f}) | {stall:.4f} s ({stall_cpu:.4f}) | 1/{sync / stall:.0f} "
            f"| {copying[0][0]:.2f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
