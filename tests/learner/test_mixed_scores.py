"""The scores of each dataset of a mix, with PyTorch. Those with TensorFlow are tested with its learner."""

from typing import Any

import pytest
import torch
from learners import learner_of
from mixed_batches import EXPECTED, mixed_batches

from hvdtrain.context import get_run_ctx
from hvdtrain.errors import ConfigError


def learner(wrong: int = 0) -> Any:
    """Its train_step marks the frames without padding as one loss, and as they come as others."""

    def train_step(*, extern_data: dict[str, Any], **_: Any) -> None:
        data, context = extern_data["data"], get_run_ctx()
        rows = data.raw_tensor[..., 0]
        flat = rows[data.mask] if hasattr(data, "mask") else rows
        context.mark_as_loss(flat, "flat", seq_lens=data.seq_lens - wrong)
        context.mark_as_loss(rows, "rows", seq_lens=data.seq_lens)
        context.mark_as_loss(data.raw_tensor.expand(*rows.shape, 2), "wide", seq_lens=data.seq_lens)

    return learner_of(lambda **_: torch.nn.Linear(1, 1), train_step)


@pytest.mark.parametrize("form", ["padded", "packed", "joined"])
def test_scores_of_each_dataset_whatever_the_form_of_batches(form: str) -> None:
    made = learner()
    made.evaluate(mixed_batches()[form])
    scores = made.meter.take_scores().means()
    assert {name: scores[name] for name in EXPECTED} == pytest.approx(EXPECTED)
    in_rows = (21 / 9, 18 / 6, 3 / 3) if form == "padded" else tuple(EXPECTED.values())
    for loss in ("rows", "wide"):
        assert [scores[f"{loss}{part}"] for part in ("", ".a", ".b")] == pytest.approx(in_rows)


def test_seq_lens_of_other_elements_than_a_loss_has_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"expected a loss with the elements of all sequences.*'flat'"):
        learner(wrong=1).evaluate(mixed_batches()["padded"])
