"""Scores of a whole dataset that are no means: `epoch_scores`."""

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from launching import refused
from learners import tiny
from thread_ranks import on_ranks
from torch import nn

import hvdtrain
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.plugins.epoch_scores.functions import EpochScores
from hvdtrain.runtime.interrupt import Stopped
from hvdtrain.runtime.scores import Scores


def dim_zero_sum(values: torch.Tensor) -> torch.Tensor:
    return values.sum(0)


class Wrong(nn.Module):
    """The share of wrong labels, as torchmetrics writes its metrics: sums as states."""

    def __init__(self, reduce: Any = dim_zero_sum) -> None:
        super().__init__()
        self._defaults = {"wrong": torch.zeros(1, dtype=torch.int64), "total": torch.tensor(0)}
        self._reductions = dict.fromkeys(self._defaults, reduce)
        self.reset()

    def reset(self) -> None:
        self.wrong, self.total = (one.clone() for one in self._defaults.values())
        self.update_called = False

    def update(self, found: torch.Tensor, targets: torch.Tensor) -> None:
        self.wrong += (found != targets).sum()
        self.total += len(targets)
        self.update_called = True

    def compute(self) -> torch.Tensor:
        return self.wrong[0] / self.total


def f1(*, counts: Any, **_: Any) -> float:
    true, found, wanted = counts
    return float(2 * true / max(found + wanted, 1))


def keys_of(folder: Path, metric: Any, **more: Any) -> dict[str, Any]:
    """A config that marks the same errors as a loss, for a metric, and as counts of F1 and of sequences without errors."""

    def train_step(*, model: nn.Module, extern_data: Mapping[str, Any], **_: Any) -> None:
        data, context = extern_data["data"], hvdtrain.get_run_ctx()
        scores, targets, mask = model(data.raw_tensor)[:, :-1], data.raw_tensor[:, 1:], data.mask[:, 1:]
        context.mark_as_loss(nn.functional.cross_entropy(scores[mask], targets[mask], reduction="none"), "ce")
        found = scores.argmax(-1)
        context.mark_as_loss(found[mask] != targets[mask], "error", as_error=True)
        metric.update(found[mask], targets[mask])
        metric.compute()  # for a log of one's own, say
        true = ((found == 0) & (targets == 0) & mask).sum(1)
        counts = torch.stack([true, ((found == 0) & mask).sum(1), ((targets == 0) & mask).sum(1)], 1)
        context.mark_as_statistics(counts.numpy(), "counts")
        if not context.train_flag:
            context.mark_as_statistics((((found == targets) | ~mask).all(1)).tolist(), "right")

    scores = {"f1": f1, "wer": metric, "right": lambda right: {"sum": right, "root": math.sqrt(right)}}
    keys = {
        "get_model": lambda **_: nn.Sequential(nn.Embedding(3, 8), nn.Linear(8, 3)),
        "train_step": train_step,
        "epoch_scores": scores,
        "early_stopping_measure": "dev_loss_f1",
        "higher_is_better": ["f1"],
    }
    return tiny(folder, 3) | keys | more


def test_they_are_scores_like_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = keys_of(tmp_path, Wrong(), eval_interval_steps=3)
    hvdtrain.train(keys, task="dry_run")
    trained = hvdtrain.train(keys)
    names = ["train_loss_f1", "train_loss_wer", "dev_loss_f1", "dev_loss_wer", "dev_loss_right_sum", "dev_loss_right_root"]
    assert trained.scores.keys() >= {*names}
    assert not [name for name in trained.scores if ":" in name or name.startswith("train_loss_right")]
    for dataset in ("train", "dev"):
        assert trained.scores[f"{dataset}_loss_wer"] == pytest.approx(trained.scores[f"{dataset}_loss_error"], rel=1e-6)
    assert hvdtrain.evaluate(keys, load_epoch=2) == {name: trained.scores[name] for name in trained.scores if name[0] == "d"}
    assert json.loads((tmp_path / "best.json").read_text())["measure"] == "dev_loss_f1"
    within = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert all(0 <= line["scores"]["dev_loss_f1"] <= 1 for line in within)


def test_metrics_that_share_states_and_those_within_others(tmp_path: Path) -> None:
    """Of a MetricCollection's metrics with equal states, one is updated, and the others get its tensors."""
    torchmetrics = pytest.importorskip("torchmetrics")
    classes = torchmetrics.classification

    def collection() -> Any:
        return torchmetrics.MetricCollection({"f1": classes.MulticlassF1Score(3), "recall": classes.MulticlassRecall(3)})

    def scores(metric: Any, **given: Any) -> dict[str, float]:
        keys = keys_of(tmp_path / "-".join(given), metric, epoch_scores=given, num_epochs=1)
        del keys["early_stopping_measure"], keys["higher_is_better"]
        return {name.split("_")[-1]: score for name, score in hvdtrain.train(keys).scores.items() if name.startswith("dev")}

    both, one, whole = collection(), collection(), collection()
    alone = scores(single := classes.MulticlassF1Score(3), f1=single)["f1"]
    recall = scores(single := classes.MulticlassRecall(3), recall=single)["recall"]
    assert scores(both, **dict(both.items())).items() >= {"f1": alone, "recall": recall}.items()
    assert scores(one, only=one["recall"])["only"] == recall
    assert scores(whole, all=whole).items() >= {"f1": alone, "recall": recall}.items()
    for metric in (torchmetrics.MinMaxMetric(single), single + single):
        with refused("epoch_scores.inner: wrong-result"):
            scores(metric, inner=metric)


def test_a_resumed_epoch_has_the_sums_of_all_its_batches(tmp_path: Path) -> None:
    class Stops:
        def on_step_end(self, training: Any) -> None:
            if training.step == 3:
                training.stop("planted")

    whole = hvdtrain.train(keys_of(tmp_path / "whole", Wrong(), num_epochs=1))
    with pytest.raises(Stopped):
        hvdtrain.train(keys_of(tmp_path / "two", Wrong(), num_epochs=1, callbacks=Stops))
    assert hvdtrain.train(keys_of(tmp_path / "two", Wrong(), num_epochs=1)).scores == whole.scores


def test_ranks_get_the_numbers_of_rank_0() -> None:
    """The sums are exact; a function that draws would give each rank another best epoch."""
    parts = []
    for totals in ([0.1] * 3, [0.2, 1e16], [-1e16]):
        part = Scores()
        part.add("ce", 1.0, 1)
        for total in totals:
            part.add("x:sum0", total, 1)
        parts.append(part.compact())
    scores = EpochScores({"ratio": lambda x: x, "drawn": lambda x: numpy.random.default_rng().random()})
    ranks = on_ranks(2, lambda comm: scores.compute(comm, Scores.merge(parts), "dev"))
    assert ranks[0] == ranks[1]
    assert ranks[0]["ratio"] == math.fsum([0.1, 0.1, 0.1, 0.2])
    assert ranks[0]["ce"] == 1.0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda counts: 1 / counts, "ZeroDivisionError"),
        (lambda other: other, "no statistic 'other' was marked (mark_as_statistics), only: counts"),
    ],
)
def test_a_function_that_fails_gives_no_number(function: Any, words: str, caplog: pytest.LogCaptureFixture) -> None:
    scores = Scores()
    scores.add("ce", 1.0, 1)
    scores.add("counts:sum0", 0.0, 1)
    with caplog.at_level("WARNING", "hvdtrain"):
        found = EpochScores({"score": function}).compute(SingleCommunicator(), scores, "dev")
    assert found["ce"] == 1.0
    assert math.isnan(found["score"])
    assert words in caplog.text


@pytest.mark.parametrize("value", ["much", None, numpy.zeros(3), torch.zeros(2), {"part": torch.zeros(2)}])
def test_what_is_no_number_is_refused_in_the_first_evaluation(value: Any) -> None:
    scores = Scores()
    scores.add("ce", 1.0, 1)
    scores.add("counts:sum0", 0.0, 1)
    name = "score_part" if isinstance(value, dict) else "score"
    for given in (lambda counts: value, SimpleNamespace(of_ranks=lambda *_: {name: value})):
        with refused(f"epoch_scores.{name}: wrong-result"):
            EpochScores({"score": given}).compute(SingleCommunicator(), scores, "dev")


def test_a_function_gets_what_its_parameters_name() -> None:
    scores = Scores()
    for name in ("x:sum0", "y:sum0", "z:sum0"):
        scores.add(name, 1.0, 1)
    scores.add("ce", 0.0, 1)
    functions = {
        "some": lambda x, y=0, absent=0: x + y + absent,
        "all": lambda x, **others: x + len(others),
        "absent": lambda absent=0: absent,
    }
    of = partial(EpochScores(functions).compute, SingleCommunicator(), scores)
    assert of("dev") == {"absent": 0.0, "all": 3.0, "ce": 0.0, "some": 2.0}
    assert of("train") == {"all": 3.0, "ce": 0.0, "some": 2.0}


def test_an_object_may_see_to_the_ranks_itself(tmp_path: Path) -> None:
    seen = []

    class Counts:
        def of_ranks(self, dataset: str, means: Mapping[str, float]) -> Mapping[str, float]:
            count, seen[:] = len(seen), []
            return {"batches": sum(hvdtrain.all_gather(count)) if dataset == "dev" else -1}

    def train_step(*, model: nn.Module, extern_data: Mapping[str, Any], **_: Any) -> None:
        context = hvdtrain.get_run_ctx()
        assert context.dataset == ("train" if context.train_flag else "dev")
        seen.append(1)
        context.mark_as_loss(model(extern_data["data"].raw_tensor).sum(), "sum")

    keys = keys_of(tmp_path, Wrong(), epoch_scores={"counts": Counts()}, train_step=train_step, num_epochs=1)
    del keys["early_stopping_measure"], keys["higher_is_better"]
    scores = hvdtrain.train(keys).scores
    assert (scores["dev_loss_batches"], scores["train_loss_batches"]) == (4, -1)


def test_what_is_refused(tmp_path: Path) -> None:
    with refused("epoch_scores.f1: wrong-type"):
        hvdtrain.train(keys_of(tmp_path, Wrong(), epoch_scores={"f1": 3}))
    for given_by_position in (max, math.sqrt):
        with refused("epoch_scores.f1: wrong-signature"):
            hvdtrain.train(keys_of(tmp_path, Wrong(), epoch_scores={"f1": given_by_position}))
    with refused("epoch_scores.wer: wrong-result"):
        hvdtrain.train(keys_of(tmp_path, Wrong(max)))
    for no_sums in (nn.ModuleList([Wrong()]), nn.Module()):
        no_sums.update = no_sums.compute = print
        with refused("epoch_scores.wer: wrong-result"):
            hvdtrain.train(keys_of(tmp_path, no_sums))
    with refused("epoch_scores: duplicate"):
        hvdtrain.train(keys_of(tmp_path, Wrong(), epoch_scores={"ce": f1}))


def test_metrics_of_torchmetrics_do_not_wait_for_other_ranks(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    syncs = {"distributed_available_fn": lambda: True, "dist_sync_on_step": True}  # for which there are none here
    accuracy = torchmetrics.classification.MulticlassF1Score(3, average="micro", **syncs)
    trained = hvdtrain.train(keys_of(tmp_path, accuracy, num_epochs=1))
    assert trained.scores["dev_loss_wer"] == pytest.approx(1 - trained.scores["dev_loss_error"], rel=1e-6)
