"""Records of runs of `hvdtrain prove`, made by hand."""

from dataclasses import replace

import numpy

from hvdtrain.plugins.prove.compare import Record, sketch

SHAPES = {"first": (40, 30), "bias": (30,), "last": (30, 5)}


def tensors(seed: int, updates: int) -> dict[str, list[numpy.ndarray]]:
    generator = numpy.random.default_rng(seed)
    return {name: [generator.normal(size=shape) for _ in range(updates)] for name, shape in SHAPES.items()}


def sketched(arrays: dict[str, list[numpy.ndarray]]) -> dict[str, numpy.ndarray]:
    return {name: numpy.stack([sketch(values) for values in several]) for name, several in arrays.items()}


def record(size: int = 1, updates: int = 3) -> Record:
    return Record(
        size=size,
        losses=[{"ce": (30.0 - step, 12.0), "errors": (7.0, 12.0)} for step in range(updates)],
        num_sequences=[4] * updates,
        data=[17] * updates,
        rates=[0.1] * updates,
        parts=[],
        apart=None,
        weights=sketched(tensors(1, updates + 1)),
        gradients=sketched(tensors(2, updates)),
        elements={name: int(numpy.prod(shape)) for name, shape in SHAPES.items()},
    )


def changed(run: Record, kind: str, update: int, name: str, by: float) -> Record:
    """The run with the gradient or the weights of one update scaled by 1 + `by`."""
    arrays = {each: values.copy() for each, values in getattr(run, kind).items()}
    arrays[name][update] *= 1 + by
    return replace(run, **{kind: arrays})
