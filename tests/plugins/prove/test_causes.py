"""Why two runs differ: each cause by itself, on records made by hand; and what is found in models."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from prove_records import changed, record

from hvdtrain.plugins.prove.causes import (
    NOT_FOUND,
    OF_BATCHES,
    RANDOM,
    STATISTICS,
    Case,
    Probe,
    causes,
    describe_exchange,
    disable_dropout,
    find_parts,
)
from hvdtrain.plugins.prove.compare import ModulePart, Record, compare

PLAIN = {"learning_rate_scale": False, "reduce_type": "grad", "average_gradients": False, "compression": None}
BATCH_NORM, DROPOUT = ModulePart(STATISTICS, "encoder.norm", "BatchNorm1d"), ModulePart(RANDOM, "drop", "Dropout")


def case(one: Record, other: Record | None = None, probe: Probe | None = None, **reduce: object) -> Case:
    """Three ranks and one, with keys of the reduction."""
    other = other or record(1)
    settings = SimpleNamespace(reduce=SimpleNamespace(**(PLAIN | reduce)), run=SimpleNamespace(backend="torch"))
    return Case("3 ranks", one, other, compare(one, other, 1e-3), 1e-3, settings, probe=probe)


def different() -> Record:
    """Three ranks with other gradients than one rank, not by a factor."""
    return changed(record(3), "gradients", 0, "last", 0.1)


def test_nothing_is_made_up() -> None:
    assert causes(case(different())) == [NOT_FOUND]
    assert causes(case(different(), probe=Probe(0.0, 0.0, 0.0))) == [NOT_FOUND]


def test_initial_weights() -> None:
    [found] = causes(case(changed(record(3), "weights", 0, "bias", 0.1)))
    assert found.startswith("initial weights: bias differs before the first update")


def test_data() -> None:
    [found] = causes(case(replace(different(), data=[17, 18, 17])))
    assert found.startswith("data: the same sequences of step 2 have different contents")


def test_a_mean_of_means() -> None:
    one, other = different(), record(1)
    for run, count in ((one, 3.0), (other, 1.0)):
        run.losses[0]["ce"] = (2.5 * count, count)
    [found] = causes(case(one, other))
    assert found.startswith("a mean of means: train_step marks ce as one number per batch, so that")


def test_padding_among_the_elements() -> None:
    one = different()
    one.losses[0]["ce"] = (30.0, 11.0)
    [found] = causes(case(one))
    assert found.startswith("elements: ce has 11 elements in step 1 of 3 ranks, 12 in that of 1 rank: are padded frames")


@pytest.mark.parametrize(("rule", "why"), [("multiply", "horovod_scale_lr = 'multiply'"), (False, "hvdtrain.size()?")])
def test_learning_rates(rule: object, why: str) -> None:
    [found] = causes(case(replace(different(), rates=[0.1, 0.3, 0.3]), learning_rate_scale=rule))
    assert found.startswith("learning rate: 0.3 instead of 0.1 in update 2")
    assert why in found


def test_averaging_parameters_is_another_training() -> None:
    [found] = causes(case(different(), reduce_type="param"))
    assert found.startswith("horovod_reduce_type = 'param': by design")


def test_a_compressed_exchange() -> None:
    [found] = causes(case(different(), compression="fp16"))
    assert found.startswith("horovod_compression = 'fp16': messages are rounded")


@pytest.mark.parametrize(("average", "why"), [(True, "horovod_avg_grad = True divides"), (False, "size of a batch")])
def test_a_factor(average: bool, why: str) -> None:
    one = record(3)
    for values in one.gradients.values():
        values /= 3
    [found] = causes(case(one, average_gradients=average))
    assert found.startswith("a factor: all gradients of update 1 are 0.333333 times those of 1 rank")
    assert why in found


def test_modules_are_named() -> None:
    batch_norm, dropout = causes(case(replace(different(), parts=[BATCH_NORM, *[DROPOUT] * 5])))
    assert batch_norm.startswith("BatchNorm1d at encoder.norm: its statistics are those of each rank's own batch")
    assert dropout.startswith(
        "Dropout at drop, Dropout at drop, Dropout at drop and 2 more: every rank draws different random numbers"
    )


def test_random_numbers_that_no_module_tells_of() -> None:
    [found] = causes(case(different(), probe=Probe(repeated=0.0, other_rank=0.02, padded=0.1)))
    assert found.startswith("random numbers in train_step or the model, but in no module known to draw them")
    [found] = causes(case(different(), probe=Probe(repeated=0.03, other_rank=0.02, padded=0.1)))
    assert found.startswith("state in the model or train_step: the same step computed twice")


def test_padding_that_changes_the_losses() -> None:
    [found] = causes(case(different(), probe=Probe(repeated=0.0, other_rank=0.0, padded=0.1)))
    assert found.startswith("padding: 3 more padded frames after the same sequences change the losses by 0.1")
    known = causes(case(replace(different(), parts=[DROPOUT]), probe=Probe(repeated=0.0, other_rank=0.1, padded=0.1)))
    assert [cause.split(":")[0] for cause in known] == ["padding", "Dropout at drop"]


def test_synchronized_statistics_are_no_cause() -> None:
    one, other = different(), record(1)
    one.parts.append(replace(BATCH_NORM, type="SyncBatchNorm"))
    other.parts.append(BATCH_NORM)
    assert causes(case(one, other)) == [NOT_FOUND]


def test_whether_it_is_the_exchange() -> None:
    one = different()
    assert describe_exchange(case(one)) is None
    same = replace(case(one), accumulated=different())
    assert "the exchange between the ranks is right" in str(describe_exchange(same))
    assert causes(same) == [OF_BATCHES]
    assert "something else, too" in str(describe_exchange(replace(case(one), accumulated=record(1))))


class Holder:
    """As much of a learner as tells its modules."""

    def __init__(self, *modules: torch.nn.Module) -> None:
        self.model = torch.nn.Sequential(*modules)

    def modules(self):
        return self.model.named_modules()


class Own(torch.nn.Module):
    """A module whose author calls the functional dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.rate = 3.0


def holder() -> Holder:
    frozen = torch.nn.BatchNorm2d(3).eval()
    recurrent = torch.nn.LSTM(3, 3, num_layers=2, dropout=0.2), torch.nn.GRU(3, 3)
    dropouts = (
        torch.nn.Dropout(0.1),
        torch.nn.Dropout(0.0),
        torch.nn.Dropout2d(0.1),
        torch.nn.MultiheadAttention(4, 1, dropout=0.1),
    )
    return Holder(torch.nn.BatchNorm1d(3), frozen, torch.nn.LayerNorm(3), *recurrent, *dropouts, Own(0.1), Own(0.0))


def test_the_parts_of_a_model() -> None:
    found = [(part.kind, part.name, part.type) for part in find_parts(holder())]
    assert found[0] == (STATISTICS, "0", "BatchNorm1d")
    assert found[1:] == [
        (RANDOM, "3", "LSTM"),
        (RANDOM, "5", "Dropout"),
        (RANDOM, "7", "Dropout2d"),
        (RANDOM, "8", "MultiheadAttention"),
        (RANDOM, "9", "Own"),
    ]


def test_dropout_is_switched_off_and_nothing_else() -> None:
    changed_one = holder()
    disable_dropout(changed_one)
    assert [part.kind for part in find_parts(changed_one)] == [STATISTICS]
    assert changed_one.model[9].rate == 3.0
    frames = torch.randn(2, 5, 3)
    lstm = changed_one.model[3].train()
    assert torch.equal(lstm(frames)[0], lstm(frames)[0])
