"""The command `hvdtrain report FOLDER...`: one page about one training or several; also `python -m hvdtrain.report`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hvdtrain.errors import HvdtrainError
from hvdtrain.report.runs import read_runs


def main(arguments: list[str] | None = None) -> int:
    """Make the page; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="hvdtrain report",
        description="Make an HTML page about a training: curves of losses, errors and learning rate, time spent, settings and "
        "their origins. With several folders the page compares the trainings.",
    )
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="the folder of scores.jsonl and the model's files"
    )
    parser.add_argument("--out", type=Path, help="the page; default: report.html in the (first) folder")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write every figure as a PNG, too")
    options = parser.parse_args(arguments)
    try:
        runs = read_runs(options.folders)
        try:
            from hvdtrain.report import page, plots
        except ImportError as error:
            raise HvdtrainError(f"expected matplotlib to draw with, got: {error} (pip install matplotlib)") from None
        chapters = page.figures_of(runs)
        out = options.out or options.folders[0] / "report.html"
        out.write_text(page.page(runs, chapters), encoding="utf-8")
        files = [out] + (page.write_pictures(options.pictures, chapters) if options.pictures else [])
        plots.close([figure for figures in chapters.values() for figure in figures.values()])
    except (HvdtrainError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(str(file) for file in files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
