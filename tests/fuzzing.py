"""Random cases: another seed in every run, which pytest names at the end, and many more of them in `make fuzz`."""

import os
import random

SEED = int(os.environ["HVDTRAIN_FUZZ_SEED"])
"""Set in conftest.py unless the environment has it: `HVDTRAIN_FUZZ_SEED=N` repeats a run."""


def cases(few: int) -> int:
    """How many cases to try: a few in `make test`, and HVDTRAIN_FUZZ_TIMES as many in `make fuzz`."""
    return few * int(os.environ.get("HVDTRAIN_FUZZ_TIMES", "1"))


def generator(name: str, case: int = 0) -> random.Random:
    """Random numbers for a case of the test `name`."""
    return random.Random(f"{SEED} {name} {case}")
