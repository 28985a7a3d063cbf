#!/usr/bin/env python3
"""Average the models of PyTorch checkpoints, with the arguments of RETURNN's tools/torch_avg_checkpoints.py.

Sums are formed in float64. What is not a floating-point number, such as BatchNorm's num_batches_tracked, is taken from the
checkpoint with the largest step. The result holds the model, that checkpoint's epoch and step, and what was merged; a training
that loads it starts with a new optimizer.
"""

import argparse
import sys
from pathlib import Path

import torch


def main(arguments: list[str] | None = None) -> int:
    """Write the average; return the exit status."""
    options = parser().parse_args(arguments)
    parts = [part for given in options.checkpoints for part in (given.split(options.separator) if options.separator else [given])]
    paths = [Path(options.prefix + part + options.postfix) for part in parts if part]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing or not paths:
        print(f"--checkpoints: expected files, got {', '.join(missing) or 'none'}", file=sys.stderr)
        return 2
    try:
        merged = average(paths)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    torch.save(merged, options.output_path)
    print(f"{options.output_path}: the average of {len(paths)} checkpoints")
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--checkpoints", nargs="+", required=True, help="the checkpoints, separated by spaces or by the separator")
    add("--separator", default=",", help="what separates checkpoints within an argument (default: ,); empty: nothing does")
    add("--prefix", default="", help="what each name begins with, such as the folder")
    add("--postfix", default="", help="what each name ends with, such as .pt")
    add("--output_path", required=True, help="the file to write")
    return made


def average(paths: list[Path]) -> dict[str, object]:
    """The contents of the averaged checkpoint. Raises: ValueError, if a file is no checkpoint or models differ."""
    sums: dict[str, torch.Tensor] = {}
    newest: dict[str, object] = {}
    epochs, steps = [], []
    for path in paths:
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(contents, dict) or not isinstance(contents.get("model"), dict):
            raise ValueError(f"{path}: expected a checkpoint with the entry 'model', got none")
        model = contents["model"]
        if differing := sorted(set(model) ^ set(sums or model)):
            raise ValueError(f"{path}: expected the parameters of {paths[0]}, got others ({', '.join(differing[:5])})")
        for name, value in model.items():
            if value.is_floating_point():
                if name in sums and sums[name].shape != value.shape:
                    raise ValueError(f"{path}: {name}: expected shape {[*sums[name].shape]}, got {[*value.shape]}")
                sums[name] = sums[name] + value if name in sums else value.double()
            else:
                sums[name] = value
        epochs.append(contents.get("epoch"))
        steps.append(contents.get("step"))
        if not newest or (contents.get("step") or 0) >= (newest["step"] or 0):
            newest = {"model": model, "epoch": contents.get("epoch"), "step": contents.get("step")}
    last = newest["model"]
    model = {
        name: (total / len(paths)).to(last[name].dtype) if last[name].is_floating_point() else last[name]
        for name, total in sums.items()
    }
    return {"model": model, "epoch": newest["epoch"], "step": newest["step"], "merged_epochs": epochs, "merged_steps": steps}


if __name__ == "__main__":
    sys.exit(main())
