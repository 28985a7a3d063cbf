"""Every collective of both transports, on three real ranks."""

from pathlib import Path

import pytest
from launching import TOY, launch, torchrun


@pytest.mark.parametrize("transport", ["use_horovod", "torch_distributed"])
def test_collectives(tmp_path: Path, transport: str) -> None:
    arguments = [str(TOY.parent / "collectives.py"), transport, str(tmp_path)]
    finished = launch(arguments, 3) if transport == "use_horovod" else torchrun(arguments, 3)
    assert finished.status == 0, finished.err
    assert sorted(path.name for path in tmp_path.glob("*.ok")) == ["0.ok", "1.ok", "2.ok"]
