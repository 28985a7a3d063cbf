#!/usr/bin/env python3
"""The word error rate of search results, with the arguments of RETURNN's tools/calculate-word-error-rate.py.

Hypotheses and references are Python dicts {tag: text}, or {tag: [(score, text), ...]} of which the first text counts; files may
end in .gz. The rate is the sum of the edit distances between words, divided by the number of words in the references.
"""

import argparse
import ast
import gzip
import math
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Print the rate, and write it if a file is given; return the exit status."""
    options = parser().parse_args(arguments)
    try:
        references, hypotheses = read(options.refs), read(options.hyps)
        missing = [tag for tag in references if tag not in hypotheses]
        if missing:
            raise ValueError(f"{options.hyps}: expected a text for every tag of {options.refs}, got none for {missing[0]!r}")
        others = [tag for tag in hypotheses if tag not in references]
        if others and options.expect_full:
            raise ValueError(f"{options.refs}: expected a reference for every hypothesis, got none for {others[0]!r}")
        errors, words = counts(references, hypotheses)
        if not words:
            raise ValueError(f"{options.refs}: expected words, got none")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    rate = f"{100 * errors / words:.2f}"
    print(f"{len(references)} sequences, {words} words, {errors} errors: WER {rate} %")
    if options.out:
        Path(options.out).write_text(f"{rate}\n", encoding="utf-8")
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--hyps", required=True, help="the hypotheses")
    made.add_argument("--refs", required=True, help="the references")
    made.add_argument("--out", help="the file to write the rate into, in percent")
    made.add_argument("--expect_full", action="store_true", help="fail if a hypothesis has no reference")
    return made


def read(name: str) -> dict[str, str]:
    """The texts of a file by tag. Raises: OSError, ValueError."""
    with gzip.open(name, "rt", encoding="utf-8") if name.endswith(".gz") else open(name, encoding="utf-8") as file:
        text = file.read().strip()
    try:
        found = ast.literal_eval(NotFinite().visit(ast.parse(text, mode="eval")))
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{name}: expected a Python dict, got: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{name}: expected a dict of texts by tag, got a {type(found).__name__}")
    return {tag: value if isinstance(value, str) else value[0][1] for tag, value in found.items()}


class NotFinite(ast.NodeTransformer):
    """Scores of n-best lists may be inf or nan, which are names to Python."""

    def visit_Name(self, node: ast.Name) -> ast.AST:  # noqa: N802  # ast's own name
        return (
            ast.copy_location(ast.Constant(math.nan if node.id == "nan" else math.inf), node)
            if node.id in ("inf", "nan")
            else node
        )


def counts(references: dict[str, str], hypotheses: dict[str, str]) -> tuple[int, int]:
    """The number of word errors, and of words in the references."""
    from rapidfuzz.distance import Levenshtein

    split = [(reference.split(), hypotheses[tag].split()) for tag, reference in references.items()]
    return sum(Levenshtein.distance(*pair) for pair in split), sum(len(reference) for reference, _ in split)


if __name__ == "__main__":
    sys.exit(main())
