#!/usr/bin/env python3
"""Average TensorFlow checkpoints (prefix files), with the arguments of RETURNN's tools/tf_avg_checkpoints.py.

Sums are formed in float64. What is not a floating-point number, such as the global step, is taken from the last checkpoint given.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy
import tensorflow as tf


def main(arguments: list[str] | None = None) -> int:
    """Write the average; return the exit status."""
    options = parser().parse_args(arguments)
    names = [options.prefix + name.strip() for name in options.checkpoints.split(",") if name.strip()]
    if not names and options.num_last_checkpoints and options.prefix:
        state = tf.train.get_checkpoint_state(os.path.dirname(options.prefix))
        names = [] if state is None else list(state.all_model_checkpoint_paths)[-options.num_last_checkpoints :]
    missing = [name for name in names if not Path(f"{name}.index").exists()]
    if missing or not names:
        print(f"--checkpoints: expected TensorFlow checkpoints, got {', '.join(missing) or 'none'}", file=sys.stderr)
        return 2
    try:
        values = average(names)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    write(values, options.output_path)
    print(f"{options.output_path}: the average of {len(names)} checkpoints")
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--checkpoints", default="", help="the checkpoints, separated by commas")
    add("--num_last_checkpoints", type=int, default=0, help="without --checkpoints: the last N of the prefix's folder")
    add("--prefix", default="", help="what each name begins with, such as the folder")
    add("--output_path", required=True, help="the prefix of the files to write")
    return made


def average(names: list[str]) -> dict[str, numpy.ndarray]:
    """By variable, its average. Raises: ValueError, if the checkpoints have different variables."""
    readers = [tf.train.load_checkpoint(name) for name in names]
    variables = readers[0].get_variable_to_shape_map()
    for name, reader in zip(names, readers, strict=True):
        if reader.get_variable_to_shape_map() != variables:
            raise ValueError(f"{name}: expected the variables of {names[0]}, got others, or other shapes")
    averaged = {}
    for variable in variables:
        values = [numpy.asarray(reader.get_tensor(variable)) for reader in readers]
        floating = numpy.issubdtype(values[-1].dtype, numpy.floating)
        averaged[variable] = numpy.mean(values, axis=0, dtype=numpy.float64).astype(values[-1].dtype) if floating else values[-1]
    return averaged


def write(values: dict[str, numpy.ndarray], path: str) -> None:
    """Write PATH.index, PATH.data-00000-of-00001 and PATH.meta, which job managers look for."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        variables = [
            v1.get_variable(name, shape=value.shape, dtype=value.dtype, use_resource=False) for name, value in values.items()
        ]
        for variable, value in zip(variables, values.values(), strict=True):
            variable.load(value, session)
        v1.train.Saver(variables).save(session, path)


if __name__ == "__main__":
    sys.exit(main())
