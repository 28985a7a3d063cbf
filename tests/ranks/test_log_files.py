"""What several ranks log, into files and commands."""

import re
from pathlib import Path

from trainings import Run, Trained, trains

RUN = Run("torch", "horovod", 2)


@trains(RUN)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    log = [str(folder / "logs" / "train.log"), f"|cat > {folder}/piped; echo done >> {folder}/piped", "|true"]
    return {"logged": {"log": log, "log_verbosity": [5, 4, 2]}, "another": {}}


def test_files_of_every_rank_and_a_command(trained: Trained) -> None:
    made = trained(trainings, RUN)
    made.needed("another.out-0")  # whose beginning ends the former one's commands
    tmp_path = made.folder
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["train.horovod-0-2.log", "train.horovod-1-2.log"]
    of_rank_0, of_rank_1 = [(tmp_path / "logs" / f"train.horovod-{rank}-2.log").read_text() for rank in range(2)]
    assert len(re.findall(r"^train epoch 1, step \d+, ", of_rank_0, flags=re.M)) == 20
    assert all("train epoch 1, finished after 20 steps" in text for text in (of_rank_0, of_rank_1))
    piped = (tmp_path / "piped").read_text().splitlines()
    assert "model: 155 parameters" in piped
    assert not any(" step " in line and "sec/step" in line for line in piped)
    assert (piped[-4], piped[-1]) == ("Finished training in epoch 1.", "done")
    assert "batch, at most: " not in made.out("logged"), "stdout is not in the list, and has 3"
    assert made.out("logged").count("epoch 1/1  train ce ") == 1
