"""Data for tests/toy/rf.config: frames of five labels, each of which lasts a few frames."""

from pathlib import Path

import numpy

from hvdtrain.plugins.hdf_tools.writer import HDFWriter


def write_words(folder: Path) -> None:
    """Write words.hdf and more_words.hdf, unless they are there."""
    for seed, (name, count) in enumerate({"words": 60, "more_words": 20}.items()):
        if (folder / f"{name}.hdf").exists():
            continue
        generator = numpy.random.default_rng(seed)
        with HDFWriter(folder / f"{name}.hdf", dims={"classes": 5}) as writer:
            for number in range(count):
                labels = generator.integers(0, 5, generator.integers(2, 6)).astype(numpy.int32)
                frames = numpy.eye(6, dtype=numpy.float32)[numpy.repeat(labels, generator.integers(4, 8, len(labels)))]
                frames += generator.normal(scale=0.3, size=frames.shape).astype(numpy.float32)
                writer.add(f"word-{number}", {"data": frames, "classes": labels})
