"""What a training prints by default: two rows about an epoch, and one at the end. Text made from numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from math import isfinite
from statistics import fmean, median_high

from hvdtrain.data.files import size_text
from hvdtrain.report.epoch import EpochReport
from hvdtrain.runtime.log import BETWEEN
from hvdtrain.runtime.timer import clock_text

BEST = "best so far"

RECENT = 8
"""The number of epochs whose mean duration the next ones are expected to have."""

SCORE_WIDTH = 5
"""Most scores have this many characters, so that those of one epoch stand below those of the one before."""

LARGE_SHARE = 0.05
"""A share of an epoch's time from which on saving is shown, as training and evaluation always are."""


def epoch_name(epoch: int, num_epochs: int) -> str:
    """The beginning of an epoch's rows.

    >>> epoch_name(3, 12)
    'epoch  3/12  '
    """
    return f"epoch {epoch:{len(str(num_epochs))}}/{num_epochs}  "


def score_row(report: EpochReport, num_epochs: int, measure: str | None, is_best: bool) -> str:
    """The scores of an epoch: of training, of the dataset that compares epochs, and of the others.

    Args:
        measure: the score that compares epochs.
        is_best: whether the epoch is the best so far.
    """
    datasets = list(dict.fromkeys(name.partition("_loss_")[0] for name in report.scores))
    measured = "" if measure is None else measure.partition("_loss_")[0]
    datasets.sort(key=lambda dataset: (dataset != "train", dataset != measured))
    parts = []
    for dataset in datasets:
        start = f"{dataset}_loss_"
        scores = {name.removeprefix(start): score for name, score in report.scores.items() if name.startswith(start)}
        # The words' place stays empty in other epochs, so that the next dataset stands below its former scores.
        words = [(BEST if is_best else "").ljust(len(BEST))] if dataset == measured else []
        parts.append("  ".join([f"{dataset} {scores_text(scores)}", *words]))
    return (epoch_name(report.epoch, num_epochs) + BETWEEN.join(parts)).rstrip()


def scores_text(scores: Mapping[str, float]) -> str:
    """Scores in columns.

    >>> scores_text({"ctc": 2.9871, "per": 0.149})
    'ctc 2.987  per 0.149'
    """
    return "  ".join(f"{name} {score_text(score):{SCORE_WIDTH}}" for name, score in scores.items())


def score_text(score: float) -> str:
    """A score with 3 or 4 digits, also if the last ones are zeros.

    >>> [score_text(score) for score in (3.41, 12.3, 4711.0, 0.15, 0.0512, 2e-7, float("nan"))]
    ['3.410', '12.30', '4711', '0.150', '0.0512', '2.00e-07', 'nan']
    """
    size = abs(score)
    if not isfinite(score) or score == 0:
        return f"{score:g}"
    if 1e3 <= size < 1e5:
        return f"{score:.0f}"
    return f"{score:#.4g}" if 1 <= size < 1e5 else f"{score:#.3g}"


def cost_row(report: EpochReport, seconds_left: float | None, now: float, indent: int) -> str:
    """What an epoch took: time, and the share of computing; speed, memory; its learning rate and padding; and when training ends.

    Args:
        seconds_left: until the last epoch is done; None: it is.
        now: the time of day.
        indent: the columns below the beginning of the row above.
    """
    parts = [times_text(report), computing_text(report)]
    if report.elapsed:
        rates = {name: count / report.elapsed for name, count in report.num_frames.items()}
        parts.append(speed_text(report.num_sequences / report.elapsed, rates))
    parts += [] if report.memory is None else [short_size(report.memory)]
    first = report.learning_rate if report.learning_rates is None else report.learning_rates["first"]
    rates_of_epoch = dict.fromkeys(map(rate_text, (first, report.learning_rate)))
    parts.append(f"lr {' -> '.join(rates_of_epoch)}")
    parts += [report.skipped_text] if report.skipped else []
    padding = report.padding.get(main_key(report.num_frames) or "", 0.0)
    parts += [f"padding {100 * padding:.0f} %"] if padding >= 0.005 else []
    parts += [] if seconds_left is None else [f"left {clock_text(seconds_left)}, ends {end_text(now, seconds_left)}"]
    return " " * indent + BETWEEN.join(parts)


UNLIKE = 0.02
"""A rank whose share of computing is lower than the others' by this is named."""


def computing_text(report: EpochReport) -> str:
    """The share of computing: the median of the ranks, and the lowest one if it is another.

    >>> computing_text(EpochReport(1, 10, 10, 107.0, 0.9931, 0.1, 50, {}, computing_of_ranks=[0.9931, 0.99, 0.7]))
    'computing 99.0 % (rank 2: 70.0 %)'
    >>> computing_text(EpochReport(1, 10, 10, 107.0, 0.99, 0.1, 50, {}, computing_of_ranks=[0.9, 0.2]))
    'computing 90.0 % (rank 1: 20.0 %)'
    """
    shares = list(report.computing_of_ranks) or [report.computing]
    usual, lowest = median_high(shares), min(shares)  # of two ranks, the higher one: their mean would be that of neither
    text = f"computing {100 * usual:.1f} %"
    return text if usual - lowest < UNLIKE else f"{text} (rank {shares.index(lowest)}: {100 * lowest:.1f} %)"


def times_text(report: EpochReport) -> str:
    """The time of an epoch's parts.

    >>> seconds = [{"compute": 100.0, "evaluation": 34.0, "saving": 0.2}]
    >>> times_text(EpochReport(1, 10, 10, 107.0, 1.0, 0.1, 50, {}, seconds=seconds))
    '1:47 train, 0:34 eval'
    """
    seconds = report.seconds[0] if report.seconds else {}
    times = {"train": report.elapsed, "eval": seconds.get("evaluation", 0.0), "saving": seconds.get("saving", 0.0)}
    if times["saving"] < LARGE_SHARE * sum(times.values()):
        del times["saving"]
    return ", ".join(f"{seconds_text(time)} {name}" for name, time in times.items() if time or name == "train")


def speed_text(sequences: float, frames: Mapping[str, float]) -> str:
    """Sequences and frames per second, of the data key with the most frames; none if each sequence is one frame.

    >>> speed_text(126.2, {"data": 1130.0, "classes": 900.0})
    '126 seq/s, 1.1 k frames/s'
    """
    key = main_key(frames)
    more = [f"{short_number(frames[key])} frames/s"] if key is not None and frames[key] > 1.001 * sequences else []
    return ", ".join([f"{short_number(sequences)} seq/s", *more])


def main_key(frames: Mapping[str, float]) -> str | None:
    """The data key with the most frames."""
    return max(frames, key=lambda name: frames[name], default=None)


def epoch_seconds(report: EpochReport) -> float:
    """The seconds of an epoch, with its evaluation and all else. Those before it was resumed are of its training only."""
    return report.seconds_before + sum(report.seconds[0].values()) if report.seconds else report.elapsed


def seconds_left(seconds: Sequence[float], epochs: float) -> float | None:
    """The seconds that some more epochs will take, by those of the epochs before; None: there are no more epochs.

    >>> seconds_left([100.0, 80.0], 3), seconds_left([100.0], 0)
    (270.0, None)
    """
    return fmean(seconds[-RECENT:]) * epochs if epochs > 0 else None


def end_text(now: float, seconds_left: float) -> str:
    """The clock time of the end; with the day if that is another one."""
    begin, end = datetime.fromtimestamp(now), datetime.fromtimestamp(now + seconds_left)
    days = (end.date() - begin.date()).days
    return end.strftime("%H:%M" if not days else "%a %H:%M" if days < 7 else "%Y-%m-%d")


def end_row(total: float | None, best: Mapping[str, object] | None, folder: str, next_command: str | None) -> tuple[str, str]:
    """The last row of a training, and the words in it about the best epoch.

    Args:
        total: the seconds of the whole training; None: nothing was trained.
        best: the contents of best.json; None: no epoch has a score.
        folder: where the models are.
        next_command: what one may type next.
    """
    parts = [] if total is None else [f"total {clock_text(total)}"]
    words = ""
    if best is not None:
        words = f"best epoch {best['epoch']}" + (f", step {best['step']}" if "step" in best else "")
        measure = str(best["measure"])
        direction = "higher" if best["higher_is_better"] else "lower"
        score = best["score"] if isinstance(best["score"], str) else score_text(float(str(best["score"])))
        file = "its model is not kept" if best["file"] is None else f"{folder}/{best['file']}"
        parts += [f"{words}: {measure.replace('_loss_', ' ', 1)} {score} ({direction} is better)", file]
    parts += [] if next_command is None else [f"next: {next_command}"]
    return BETWEEN.join(parts), words


def progress_parts(means: str, speed: tuple[float, Mapping[str, float]] | None, memory: int | None) -> list[str]:
    """What follows in a line about a step: the mean losses since the epoch began, the speed, and the memory."""
    parts = [f"mean {means}"] if means else []
    parts += [] if speed is None else [speed_text(*speed)]
    return parts + ([] if memory is None else [short_size(memory)])


def seconds_text(seconds: float) -> str:
    """A time, as short as it is clear.

    >>> [seconds_text(seconds) for seconds in (0.04, 9.4, 107, 3767)]
    ['0.0 s', '9.4 s', '1:47', '1:02:47']
    """
    return f"{seconds:.1f} s" if seconds < 9.95 else clock_text(seconds).removeprefix("0:").removeprefix("0")


def rate_text(rate: float) -> str:
    """A learning rate.

    >>> [rate_text(rate) for rate in (0.0011, 5e-4, 0.05, 1.0, 0.0, 1.25e-5)]
    ['1.1e-3', '5e-4', '0.05', '1', '0', '1.25e-5']
    """
    if not 0 < abs(rate) < 0.01:
        return f"{rate:.3g}"
    digits, _, exponent = f"{rate:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def short_number(number: float) -> str:
    """A number with about two digits.

    >>> [short_number(number) for number in (0.42, 4.2, 126.2, 1130, 26_000, 2_300_000)]
    ['0.42', '4.2', '126', '1.1 k', '26 k', '2.3 M']
    """
    for factor, unit in ((1e6, " M"), (1e3, " k")):
        if number >= 0.9995 * factor:
            return f"{number / factor:.{0 if number >= 9.95 * factor else 1}f}{unit}"
    return f"{number:.0f}" if number >= 9.95 else f"{number:.2g}"


def short_size(size: int) -> str:
    """A number of bytes.

    >>> short_size(760_000_000), short_size(5 << 30)
    ('725 MB', '5.0 GB')
    """
    number, unit = size_text(size).split()
    return f"{number if float(number) < 9.95 else round(float(number))} {unit}"
