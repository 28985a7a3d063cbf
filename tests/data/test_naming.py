"""The batch in which the config's functions raise."""

import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from hvdtrain.data.naming import Naming
from hvdtrain.data.types import Batch, Padded
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.learner.torch.tensors import tensors_of

DATA = {
    "data": Padded(numpy.zeros((7, 9, 2), numpy.float32), numpy.array([9, 3, 4, 5, 6, 7, 8], numpy.int32)),
    "classes": Padded(numpy.zeros((7, 2), numpy.int8), numpy.array([1, 2, 1, 1, 1, 1, 1], numpy.int32)),
}
BATCH = Batch(DATA, numpy.arange(7), lambda: [f"seq-{number}" for number in range(7)])
TEXT = (
    "in this batch: data float32 (7, 9, 2), seq_lens 3 to 9; classes int8 (7, 2), seq_lens 1 to 2; "
    "sequences: seq-0, seq-1, seq-2, seq-3, seq-4, 2 more"
)


def test_the_traceback_ends_with_the_batch() -> None:
    with pytest.raises(ValueError, match="broken") as caught, Naming(BATCH):
        raise ValueError("broken")
    assert "".join(traceback.format_exception(caught.value)).endswith(f"ValueError: broken\n{TEXT}\n")


def test_class_indices_of_another_type_are_reported() -> None:
    scores, targets = torch.zeros(7, 3), torch.tensor(DATA["classes"].values[:, 0])
    with pytest.raises(RuntimeError) as caught, Naming(BATCH):
        torch.nn.functional.cross_entropy(scores, targets)
    hint = "class indices have the type of the dataset: PyTorch's losses require int64, as in raw_tensor.long()"
    assert caught.value.__notes__ == [TEXT, hint]


TENSORS = "extern_data[KEY] has raw_tensor (batch, time, ...), seq_lens (batch,) and mask (batch, time)"


@pytest.mark.parametrize(
    ("work", "advice"),
    [
        (
            lambda extern_data: extern_data["clases"],
            "if 'clases' is to be a data key: extern_data has 'data', 'classes' (did you mean classes?)",
        ),
        (lambda extern_data: extern_data.classes, "extern_data is a dict: extern_data['classes']"),
        (lambda extern_data: extern_data["data"].shape, TENSORS),
        (lambda extern_data: torch.nn.Linear(2, 2)(extern_data["data"]), TENSORS),
        (lambda extern_data: torch.nn.Linear(2, 2).weights, None),
        (lambda extern_data: extern_data["data"].raw_tensor[:, 9], None),
    ],
)
def test_how_a_data_key_or_its_tensor_is_asked_for(work: Callable[[Any], object], advice: str | None) -> None:
    with pytest.raises((KeyError, AttributeError, TypeError, IndexError)) as caught, Naming(BATCH):
        work(tensors_of(BATCH))
    assert caught.value.__notes__ == [TEXT, *([advice] if advice else [])]


def test_one_label_per_sequence_has_a_time_axis() -> None:
    labels = numpy.zeros((7, 1), numpy.int64)
    batch = replace(BATCH, data={**DATA, "classes": Padded(labels, numpy.ones(7, numpy.int32))})
    with pytest.raises(RuntimeError) as caught, Naming(batch):
        torch.nn.functional.cross_entropy(torch.zeros(7, 3), torch.tensor(labels))
    assert caught.value.__notes__[1:] == [
        "classes is one number per sequence, of shape (batch, 1): raw_tensor[:, 0] has shape (batch,)"
    ]


def test_a_message_for_users_stays_as_it_is() -> None:
    with pytest.raises(ConfigError) as caught, Naming(BATCH):
        raise ConfigError(["train_step: expected another name"])
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(ValueError, match="no batch") as other, Naming(None):
        raise ValueError("no batch")
    assert not hasattr(other.value, "__notes__")


def test_the_error_stays_where_the_tags_cannot_be_read() -> None:
    def tags() -> list[str]:
        raise DataError("the file has changed")

    with pytest.raises(ValueError, match="broken") as caught, Naming(replace(BATCH, seq_tags=tags)):
        raise ValueError("broken")
    assert caught.value.__notes__ == [TEXT.partition("; sequences")[0]]


def test_items_that_are_batches() -> None:
    images = Padded(numpy.zeros((2, 32, 1, 28, 28), numpy.float32), numpy.array([32, 32], numpy.int32))
    labels = Padded(numpy.zeros((2, 32), numpy.int64), numpy.array([32, 32], numpy.int32))
    batch = Batch({"data": images, "classes": labels}, numpy.arange(2))
    with pytest.raises(RuntimeError) as caught, Naming(batch):
        torch.nn.Conv2d(1, 2, 3)(torch.from_numpy(images.values))
    assert "if items have 32 frames because they are batches: hvdtrain makes the batches" in caught.value.__notes__[1]
