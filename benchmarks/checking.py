"""What it costs to check a checkpoint while it is loaded, and to fill in the checksum of one that is saved.

    python benchmarks/checking.py --megabytes 1000

A model of that size with Adam's state is loaded with the checks and without, in turn: files as they are loaded at a resume, into
a model and an optimizer. Files are in the page cache, so the disk does not hide anything.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from hvdtrain.learner import model_format  # noqa: E402
from hvdtrain.learner.integrity import check_while_reading, damage, write_checksum  # noqa: E402
from hvdtrain.learner.torch.model_file import read_file, write_file, write_model  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the model")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    layer = 4 << 20  # of float32
    model = torch.nn.ParameterList([torch.randn(layer // 4) for _ in range(max(1, options.megabytes * 10**6 // layer))])
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    progress = {"epoch": 1, "step": 1}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_file(folder / "model.opt.pt", {"optimizer": optimizer.state_dict(), **progress})
        write_model(folder / "model.pt", model.state_dict(), progress, "pt")
        write_model(folder / "model.safetensors", model.state_dict(), progress, "safetensors")
        for model_file in ("model.pt", "model.safetensors"):

            def load(with_checks: bool, model_file: str = model_file) -> float:
                model_format.check_while_reading = check_while_reading if with_checks else lambda _: nullcontext()  # type: ignore[assignment]
                began = time.perf_counter()
                model.load_state_dict(read_file(folder / model_file, torch.device("cpu"))["model"])
                optimizer.load_state_dict(read_file(folder / "model.opt.pt", torch.device("cpu"))["optimizer"])
                return time.perf_counter() - began

            load(True)
            pairs = [(load(False), load(True)) for _ in range(options.repetitions)]
            without, within = (median(times) for times in zip(*pairs, strict=True))
            more = within / without - 1
            print(f"{model_file} with Adam's state: {without:.3f} s without checks, {within:.3f} s with them ({more:+.1%})")
        for file in sorted(folder.iterdir()):
            began = time.perf_counter()
            damage(file)
            seconds = time.perf_counter() - began
            print(f"{file.name}: {file.stat().st_size / seconds / 1e9:.1f} GB/s to check it alone")
        file = folder / "model.safetensors"
        began = time.perf_counter()
        write_checksum(file)
        print(f"model.safetensors: {time.perf_counter() - began:.3f} s to fill in the checksum, with the way to the disk")


if __name__ == "__main__":
    main()
