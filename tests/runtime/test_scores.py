"""Scores: exact sums, whoever added what in whatever order."""

import pickle
import random
from fractions import Fraction
from math import inf, isnan, nan

import pytest

from hvdtrain.runtime.scores import Scores, text


def scores_of(batches: list[tuple[str, float, float]]) -> Scores:
    scores = Scores()
    for name, total, count in batches:
        scores.add(name, total, count)
    return scores


def random_batches(seed: int, size: int = 300) -> list[tuple[str, float, float]]:
    """Sums of all magnitudes and both signs, for which adding floats one by one depends on the order."""
    generator = random.Random(seed)
    return [
        (generator.choice("ab"), generator.uniform(-1, 1) * 10.0 ** generator.randint(-12, 12), float(generator.randint(1, 99)))
        for _ in range(size)
    ]


def test_a_mean_is_the_sum_over_the_count() -> None:
    scores = scores_of([("ce", 3.0, 2), ("fer", 1.0, 4), ("ce", 5.0, 2)])
    assert scores.means() == {"ce": 2.0, "fer": 0.25}
    assert scores.counts() == {"ce": 4.0, "fer": 4.0}


@pytest.mark.parametrize("seed", range(5))
def test_means_are_the_exact_quotient_rounded_once_for_the_sum(seed: int) -> None:
    """So the order of adding cannot be seen."""
    batches = random_batches(seed)
    means = scores_of(batches).means()
    for name in "ab":
        total = sum(Fraction(one) for key, one, _ in batches if key == name)
        count = sum(int(one) for key, _, one in batches if key == name)
        assert means[name] == float(total) / count


def test_small_sums_are_not_lost_beside_large_ones() -> None:
    assert scores_of([("a", 1e16, 1), ("a", 1.0, 1), ("a", -1e16, 1), ("a", 1.0, 1)]).means() == {"a": 0.5}


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 400])
def test_any_number_of_ranks_gives_the_same_means(ranks: int) -> None:
    batches = random_batches(1)
    parts = [scores_of(batches[rank::ranks]) for rank in range(ranks)]
    assert Scores.merge(parts).means() == scores_of(batches).means()
    assert Scores.merge(reversed(parts)).means() == scores_of(batches).means()
    assert Scores.merge(parts).counts() == scores_of(batches).counts()


def test_merging_changes_no_part() -> None:
    first, second = scores_of([("a", 1.0, 1)]), scores_of([("a", 3.0, 1), ("b", 1.0, 1)])
    merged = Scores.merge([first, second])
    merged.add("a", 100.0, 1)
    assert first.means() == {"a": 1.0}
    assert second.means() == {"a": 3.0, "b": 1.0}
    assert Scores.merge([]).means() == {}


def test_scores_travel_between_ranks() -> None:
    scores = scores_of(random_batches(2))
    assert pickle.loads(pickle.dumps(scores)).means() == scores.means()


def test_names_come_in_alphabetical_order() -> None:
    assert list(scores_of([("b", 1.0, 1), ("a", 1.0, 1), ("c", 1.0, 1)]).means()) == ["a", "b", "c"]


def test_where_nothing_was_counted_there_is_no_mean() -> None:
    assert isnan(scores_of([("a", 0.0, 0)]).means()["a"])
    assert Scores().means() == {}


def test_losses_that_are_not_finite_stay_so() -> None:
    assert scores_of([("a", inf, 1), ("a", 1.0, 1)]).means() == {"a": inf}
    assert isnan(scores_of([("a", nan, 1), ("a", 1.0, 1)]).means()["a"])
    assert isnan(scores_of([("a", inf, 1), ("a", -inf, 1)]).means()["a"])
    assert isnan(scores_of([("a", 1e308, 1), ("a", 1e308, 1)]).means()["a"])  # beyond what a float can hold


def test_means_as_text() -> None:
    assert text({"ce": 0.321456, "fer": 12345.678, "x": nan}) == "ce 0.3215, fer 1.235e+04, x nan"
    assert text({}) == ""
