"""torch.distributed learns what Horovod learns, and its ranks find each other however they are started."""

from pathlib import Path

import pytest
import torch
from trainings import Results, ResultsOf, Run, Trained, assert_same, trains

RANKS = 2
HOROVOD, TORCH_DISTRIBUTED = (Run("torch", transport, RANKS) for transport in ("horovod", "torch.distributed"))
ALONE = HOROVOD.alone
EQUAL = {
    "min_seq_length": {"data": 6},
    "max_seq_length": {"data": 6},
}  # no padding: BatchNorm counts it, and ranks pad differently

# The overrides of each training by name; for torch.distributed, what stands in its dict instead of the horovod_ keys. What needs
# no such key is compared with one rank in test_contract.py.
TRAININGS: dict[str, tuple[dict[str, object], dict[str, object], dict[str, object]]] = {
    "average": ({"losses": "mean", "evaluated": True}, {"horovod_avg_grad": True}, {"avg_grad": True}),
    "param_every_7": (
        {"layers": "statistics"},
        {"horovod_reduce_type": "param", "horovod_param_sync_step": 7},
        {"reduce_type": "param", "param_sync_step": 7},
    ),
    "inherited": ({}, {"horovod_reduce_type": "param", "horovod_param_sync_step": 4}, {}),
    "everything_everywhere": (
        {},
        {"horovod_dataset_distribution": "random_seed_offset", "horovod_scale_lr": "divide"},
        {"dataset_distribution": "random_seed_offset", "scale_lr": "divide"},
    ),
    "synchronized": ({"layers": "only_statistics", **EQUAL, "sync_batch_norm": True}, {}, {}),
    "total": ({"max_seqs": None, "max_seqs_total": 12, "losses": "mean"}, {}, {}),
    "unsynchronized": ({"layers": "only_statistics", **EQUAL}, {}, {}),
    "sharded": ({"optimizer": {"class": "adam"}, "gradient_clip_global_norm": 5.0}, {}, {"sharded": True}),
    "sharded_decayed": ({"optimizer": {"class": "adagrad", "weight_decay": 0.01}}, {}, {"sharded": True}),
}


@trains(HOROVOD, TORCH_DISTRIBUTED, ALONE)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    made = {}
    for name, (common, horovod, entries) in TRAININGS.items():
        if run == TORCH_DISTRIBUTED:
            made[name] = {**common, "torch_distributed": entries, **({} if entries else horovod)}
        else:
            made[name] = {**common, **horovod}
    return made if run != ALONE else {name: made[name] for name in ("synchronized", "total")}


NARROW = {"losses": "mean", "optimizer": {"class": "adam"}, "gradient_clip_global_norm": 5.0}
NARROWED = {
    "wide": {**NARROW, "torch_distributed": {}},
    "bf16": {**NARROW, "torch_distributed": {"compression": "bf16"}},
    "bf16_sharded": {**NARROW, "torch_distributed": {"compression": "bf16", "sharded": True}},
    "powersgd": {**NARROW, "torch_distributed": {"compression": "powersgd", "compression_rank": 1}},
}
"""With smaller messages."""


@trains(slow=[TORCH_DISTRIBUTED])
def narrowed(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return {name: {**given, "layers": "statistics"} for name, given in NARROWED.items()}


def weights(results: Results, name: str) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(array) for key, array in results.weights(name).items()}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest, relative to each tensor's largest element."""
    assert one.keys() == other.keys()
    pairs = [(one[name].double(), other[name].double()) for name in one if one[name].abs().max() > 0]
    return max(((left - right).abs().max() / left.abs().max()).item() for left, right in pairs)


@pytest.mark.parametrize("name", sorted(TRAININGS))
def test_the_same_losses_and_weights_as_with_horovod(results: ResultsOf, name: str) -> None:
    horovod, distributed = results(HOROVOD), results(TORCH_DISTRIBUTED)
    for one, other in zip(horovod.scores(name), distributed.scores(name), strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    assert difference(weights(horovod, name), weights(distributed, name)) < 1e-5
    assert_same(distributed.weights(name), distributed.weights(name, 1))


@pytest.mark.slow
def test_gradients_in_smaller_messages_teach_about_the_same(trained: Trained) -> None:
    made = trained(narrowed, TORCH_DISTRIBUTED)
    losses = {name: made.scores(name)[-1]["train_loss_ce"] for name in NARROWED}
    for name, tolerance in {"bf16": 0.02, "bf16_sharded": 0.02, "powersgd": 0.1}.items():
        assert losses[name] == pytest.approx(losses["wide"], rel=tolerance)
        assert losses[name] != losses["wide"]
        assert_same(made.weights(name), made.weights(name, 1))


@pytest.mark.parametrize("run", [HOROVOD, TORCH_DISTRIBUTED], ids=str)
def test_with_synchronized_batch_norm_ranks_learn_what_one_learns(results: ResultsOf, run: Run) -> None:
    alone = weights(results(ALONE), "synchronized")
    assert difference(alone, weights(results(run), "synchronized")) < 1e-4
    assert difference(alone, weights(results(run), "unsynchronized")) > 1e-2


@pytest.mark.parametrize("run", [HOROVOD, TORCH_DISTRIBUTED], ids=str)
def test_with_a_total_batch_ranks_learn_what_one_learns(results: ResultsOf, run: Run) -> None:
    assert difference(weights(results(ALONE), "total"), weights(results(run), "total")) < 1e-5
    assert results(ALONE).scores("total")[-1] == pytest.approx(results(run).scores("total")[-1], rel=1e-5)


CHAIN = [Run("torch", "torch.distributed", 3), ALONE, TORCH_DISTRIBUTED]
"""In which one epoch each is trained."""


def of_chain(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    common = {"optimizer": {"class": "adam"}, "losses": "mean", "learning_rate": 0.002, "parts": 2}
    number = CHAIN.index(run)
    given = {**common, "model": folder.parent.parent / "chain-sharded" / "model", "num_epochs": 1 + number}
    if run.size > 1:
        given["torch_distributed"] = {"sharded": True}
    return {"chain": given, **({"alone": {**common, "num_epochs": len(CHAIN)}} if run.size == 1 else {})}


@trains(slow=[CHAIN[0]])
def first_of_chain(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return of_chain(run, folder)


@trains(slow=[CHAIN[1]], after=CHAIN[0])
def second_of_chain(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return of_chain(run, folder)


@trains(slow=[CHAIN[2]], after=CHAIN[1])
def third_of_chain(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return of_chain(run, folder)


@pytest.mark.slow
def test_a_sharded_training_goes_on_with_any_number_of_ranks(trained: Trained) -> None:
    """One epoch on three ranks, one alone, one on two, against three epochs alone; sharded where there are several."""
    end, alone = trained(third_of_chain, CHAIN[2]), trained(second_of_chain, ALONE)
    assert [report["epoch"] for report in end.reports("chain")] == [1, 2, 3]
    models = end.models["chain"], alone.models["alone"]
    one, other = (torch.load(model.with_name("model.003.pt"), weights_only=True)["model"] for model in models)
    assert difference(one, other) < 1e-5
    one, other = (torch.load(model.with_name("model.003.opt.pt"), weights_only=True) for model in models)
    assert one["optimizer"]["state"].keys() == other["optimizer"]["state"].keys()
    assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]
