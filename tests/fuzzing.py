"""Random cases: the same in every `make test`; new ones, and many more, in `make fuzz`, whose seed pytest names at the end.

What new cases find becomes a case of its own, with its values written out: tests/config/test_random_values.py has examples.
"""

import os
import random

SEED = int(os.environ["HVDTRAIN_FUZZ_SEED"])
"""1, or what the environment has: `HVDTRAIN_FUZZ_SEED=N` repeats a run."""


def cases(few: int) -> int:
    """How many cases to try: a few in `make test`, and HVDTRAIN_FUZZ_TIMES as many in `make fuzz`."""
    return few * int(os.environ.get("HVDTRAIN_FUZZ_TIMES", "1"))


def generator(name: str, case: int = 0) -> random.Random:
    """Random numbers for a case of the test `name`."""
    return random.Random(f"{SEED} {name} {case}")
