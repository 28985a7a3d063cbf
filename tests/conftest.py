"""What several tests need: a small corpus of sequences of different lengths."""

import signal
from pathlib import Path

import numpy
import pytest
from trainings import Trained

from hvdtrain.data.hdf.writer import HDFWriter


def write_corpus(path: Path, num_sequences: int, seed: int) -> None:
    """Frames of 4 features, a class of 5 for every frame, and the sequence's number as a key of its own."""
    generator = numpy.random.default_rng(seed)
    with HDFWriter(path, dims={"classes": 5, "id": num_sequences}) as writer:
        for number in range(num_sequences):
            length = int(generator.integers(1, 13))
            classes = generator.integers(0, 5, length).astype(numpy.int32)
            frames = generator.normal(size=(length, 4)).astype(numpy.float32)
            frames[:, 0] += classes
            writer.add(f"seq-{number}", {"data": frames, "classes": classes, "id": numpy.array([number], numpy.int32)})


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.hdf (231 sequences: no multiple of 12), even.hdf (240), two.hdf (2) and dev.hdf (101)."""
    folder = tmp_path_factory.mktemp("corpus")
    for seed, (name, size) in enumerate({"train": 231, "even": 240, "two": 2, "dev": 101}.items()):
        write_corpus(folder / f"{name}.hdf", size, seed)
    return folder


def pytest_configure() -> None:
    """A shell without job control has background commands ignore SIGINT, and their children after them: `make test &`."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def trained(request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What the trainings of the collected modules left (trainings.py)."""
    return Trained(corpus, tmp_path_factory.mktemp("trained"), {item.path for item in request.session.items})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """RETURNN, which some tests call, switches TensorFlow to the behaviour of its version 1 for the rest of the process: tests
    that need version 2 come first.
    """
    items.sort(key=lambda item: not item.path.name.startswith("test_tensorflow"))
