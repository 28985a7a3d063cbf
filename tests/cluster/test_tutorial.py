"""docs/tutorial.md, from the laptop to the cluster, on which a node is lost."""

from pathlib import Path

from cluster.hosts import Hosts
from tutorial import PAGE, on_cluster


def test_all_commands_print_what_the_page_shows(hosts: Hosts, tmp_path: Path) -> None:
    folder = tmp_path / "tutorial"
    folder.mkdir()
    page = PAGE.read_text()
    with on_cluster(folder, hosts) as tutorial:
        assert tutorial.run(page) == page, "run .venv/bin/python tests/tutorial.py"
