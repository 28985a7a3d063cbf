"""Scores of a whole dataset that are no means, such as BLEU: functions of sums over its sequences (the key `epoch_scores`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any

from hvdtrain.comm.base import Communicator, on_rank_zero
from hvdtrain.config.references import as_function
from hvdtrain.errors import ConfigError
from hvdtrain.learner.epoch_scores import Scoring
from hvdtrain.plugins.epoch_scores import EpochScoreKeys
from hvdtrain.runtime import log
from hvdtrain.runtime.scores import Scores
from hvdtrain.settings import Settings


def open_scoring(settings: Settings) -> EpochScores:
    """Of the table `scorings`: that of the key `epoch_scores`."""
    return EpochScores(settings.of(EpochScoreKeys).epoch_scores)


@dataclass(frozen=True)
class ScoreFunction:
    """A function of the sums of statistics.

    Attributes:
        needs: the names of those that it cannot be called without.
        takes: the names of those that it is called with, if they were marked; None: all.
    """

    call: Callable[..., Any]
    needs: Collection[str]
    takes: Collection[str] | None


class EpochScores(Scoring):
    """The functions by the names of their scores. One is called with the sums of the statistics that its parameters name.

    An object with the method `of_ranks` sees to the ranks itself: all call it with the dataset's name and the means of its losses
    and errors by name, and it returns scores by name, the same on all of them.

    Raises:
        ConfigError: a function cannot be called so.
    """

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._given = functions
        self._of_ranks: list[Callable[[str, Mapping[str, float]], Any]] = []
        self._functions: dict[str, ScoreFunction] | None = None  # None: they are not prepared

    def prepare(self, device: Any) -> Sequence[Any]:
        functions: Mapping[str, Any] = self._given
        metrics: Sequence[Any] = ()
        if device is not None:
            from hvdtrain.plugins.epoch_scores.summed import SummedMetric, open_scores  # here, as it imports PyTorch

            functions = open_scores(functions, device)
            metrics = [function for function in functions.values() if isinstance(function, SummedMetric)]
        self._of_ranks = [function.of_ranks for function in functions.values() if hasattr(function, "of_ranks")]
        self._functions = {}
        for name, value in functions.items():
            where = f"epoch_scores.{name}"
            if not hasattr(value, "of_ranks") and (function := as_function(value, where)) is not None:
                self._functions[name] = _with_parameters(function, where)
        return metrics

    def compute(self, comm: Communicator, scores: Scores, dataset: str) -> dict[str, float]:
        """Collective, if there are functions. The means of losses and errors, and these scores; in alphabetical order.

        One whose function fails, or whose statistics an evaluation did not mark, is NaN, with a warning. In training, functions
        without statistics are left out.

        Raises:
            ConfigError: on all ranks: what a function returns is no number.
        """
        if self._functions is None:
            self.prepare(None)
        means = scores.means()
        computed: dict[str, float] = {}
        for of_ranks in self._of_ranks:
            returned = of_ranks(dataset, means)
            if not isinstance(returned, Mapping):
                raise ConfigError.of(
                    "wrong-result", f"epoch_scores: expected of_ranks to return a dict of scores by name, got {returned!r:.60}"
                )
            computed |= {name: _number(name, value) for name, value in returned.items()}
        if self._functions and scores.counts():
            computed |= on_rank_zero(comm, partial(self._of_functions, scores, dataset), name="epoch_scores")
        if not computed:
            return means
        if both := sorted(computed.keys() & means.keys()):
            raise ConfigError.of("duplicate", f"epoch_scores: expected names that no loss has, got {', '.join(both)}")
        return dict(sorted({**means, **computed}.items()))

    def _of_functions(self, scores: Scores, dataset: str) -> dict[str, float]:
        import numpy  # here, as --help imports this file

        computed: dict[str, float] = {}
        sums = {name: numpy.array(of_name) if len(of_name) > 1 else of_name[0] for name, of_name in scores.statistics().items()}
        for name, function in (self._functions or {}).items():
            arguments = {state: value for state, value in sums.items() if function.takes is None or state in function.takes}
            missing = [state for state in function.needs if state not in arguments]
            if dataset == "train" and (missing or (not arguments and (function.takes is None or function.takes))):
                continue
            try:
                if missing:
                    raise LookupError(f"no statistic {missing[0]!r} was marked (mark_as_statistics), only: {', '.join(sums)}")
                result = function.call(**arguments)
            except Exception as error:  # of the user's function; the epoch that was trained is not to be lost
                log.warning(f"{dataset}: epoch_scores.{name} has no value: {type(error).__name__}: {error}")
                computed[name] = nan
                continue
            several = (
                {f"{name}_{suffix}": value for suffix, value in result.items()} if hasattr(result, "items") else {name: result}
            )
            computed.update({name: _number(name, value) for name, value in several.items()})
        return computed


def _number(name: str, value: Any) -> float:
    """A score. Raises: ConfigError, if it is none, which it would not be in any other evaluation."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last one is PyTorch's, of several elements
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else f" {value!r:.60}"
        raise ConfigError.of(
            "wrong-result", f"epoch_scores.{name}: expected a number or a dict of numbers, got {type(value).__name__}{shape}"
        ) from None


def _with_parameters(function: Callable[..., Any], where: str) -> ScoreFunction:
    """A function with the names of its parameters. Raises: ConfigError."""
    if (states := getattr(function, "statistics", None)) is not None:
        return ScoreFunction(function, states, states)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        parameters = None
    if parameters is None or any(each.kind is each.POSITIONAL_ONLY and each.default is each.empty for each in parameters):
        raise ConfigError.of(
            "wrong-signature", f"{where}: expected a function whose parameters are names of statistics, got {function!r}"
        )
    named = {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    needs = [name for name, each in named.items() if each.default is each.empty]
    return ScoreFunction(function, needs, None if takes_all else named.keys())
