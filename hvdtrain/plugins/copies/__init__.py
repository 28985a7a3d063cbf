"""Copies of data files on a local disk of every host: the key `cache_dir`. Files at URLs are only read from such copies."""

from dataclasses import dataclass

from hvdtrain.config.keys import Rule, Section, key, parsed_by
from hvdtrain.config.plugins import Plugin
from hvdtrain.data.files import parse_size


@dataclass(frozen=True, kw_only=True)
class CopyKeys(Section):
    """Copies of data files on a local disk."""

    cache_dir: str | None = key(
        None,
        "a folder on a local disk of every host: data files are copied there first, once per host, and read from there; "
        "None: they are read from their original paths",
    )
    cache_dir_size: int | str = key(
        -1,
        "limit of the size of all copies in cache_dir, with K, M or G; copies that no running job uses are removed for new ones; "
        "-1: the size of the disk",
        Rule("a size such as '500G', or -1", parsed_by(parse_size)),
    )


PLUGIN = Plugin(copiers={"cache_dir": f"{__name__}.copier:CACHE_DIR"}, keys={"copies": CopyKeys})
