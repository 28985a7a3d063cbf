"""How much memory is free."""

from pathlib import Path

from hvdtrain.runtime.memory import _available_memory, _memory_left, host_memory


def test_the_memory_of_a_host_and_of_a_control_group(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       8000 kB\nMemAvailable:   5000 kB\n")
    assert _available_memory(tmp_path / "meminfo") == 5000 << 10
    assert _available_memory(tmp_path / "none") is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 500\nfile 300\n")
    assert _memory_left(tmp_path) == 400  # the page cache gives way
    (tmp_path / "memory.max").write_text("max\n")
    assert _memory_left(tmp_path) is None


def test_this_host_has_some_memory() -> None:
    memory = host_memory()
    assert memory is not None
    assert 1 << 20 < memory < 1 << 50
