"""The layout of RETURNN's HDF files: the members of a file, checks that they are consistent, and links to other files."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Iterator
from itertools import count, islice
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy

from hvdtrain.data.files import why_not_opened
from hvdtrain.data.types import Array, External, Stream
from hvdtrain.errors import DataError

ROWS_AT_ONCE = 1 << 20
"""The number of sequences whose lengths are read at once."""

HINT = "allow_external in the dataset dict allows it"


def open_file(path: Path) -> h5py.File:
    """An HDF5 file, open for reading. Raises: DataError."""
    if not path.exists():
        hint = f" (a list of the files that match: sorted(glob.glob({str(path)!r})))" if "*" in path.name else ""
        raise DataError(f"{path}: expected an HDF file, got: no such file{hint}")
    if not path.is_file():  # opening a named pipe would wait for ever
        raise DataError(f"{path}: expected an HDF file, got a {'directory' if path.is_dir() else 'pipe or device'}")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        if why_not_opened(error) or h5py.is_hdf5(path):
            raise damage_error(path, error) from None
        if isinstance(error, PermissionError):
            raise DataError(f"{path}: expected a file that can be read, got: permission denied") from None
        content = "something else" if path.stat().st_size else "an empty file"
        hint = f" (a class or function in it: {path}:NAME)" if path.suffix == ".py" else ""
        raise DataError(f"{path}: expected an HDF5 file, got {content}{hint}") from None


def damage_error(path: Path, error: Exception) -> DataError:
    """The error for a file that h5py cannot read: it is damaged, or there is something else in the way."""
    if isinstance(error, OSError) and (reason := why_not_opened(error)):
        many = "; a FilesDataset has few of its files open at a time" if "limit" in reason else ""
        return DataError(f"{path}: expected a file that can be opened, got {reason}{many}")
    cut_off = re.search(r"truncated file: eof = (\d+), .*stored_eof = (\d+)", str(error))
    damage = f"the first {cut_off[1]} of its {cut_off[2]} bytes" if cut_off else error
    return DataError(f"{path}: expected a whole HDF5 file, got a damaged one: {damage}")


def names_to_read(file: h5py.File) -> Iterator[str]:
    """The names of everything that is read from a file, groups before their members."""
    yield from ("inputs", "labels", "seqLengths", "seqTags", "targets", "targets/data", "targets/size", "targets/labels")
    for folder in ("targets/data", "targets/labels"):
        parent = file.get(folder)
        yield from (f"{folder}/{name}" for name in (parent if isinstance(parent, h5py.Group) else ()))


def sources_of(path: Path, file: h5py.File) -> dict[str, h5py.Dataset]:
    """The dataset of every data key, in the order of the columns of /seqLengths: inputs first, then targets by name."""
    sources = {}
    if "inputs" in file:
        sources["data"] = dataset_in(path, file, "inputs")
    if "targets" in file:
        if not isinstance(member(path, file, "targets"), h5py.Group):
            raise DataError(f"{path}: expected /targets to be a group, got a dataset")
        group = member(path, file, "targets/data")
        if not isinstance(group, h5py.Group):
            raise DataError(f"{path}: expected /targets/data to be a group, got a dataset")
        for key in sorted(group):
            if key in sources:
                raise DataError(f"{path}: expected 'data' once, got it as /inputs and as /targets/data/data")
            sources[key] = dataset_in(path, file, f"targets/data/{key}")
    if not sources:
        raise DataError(
            f"{path}: expected /inputs or /targets/data (the layout of RETURNN's HDFDataset), got only {names_in(file)}"
        )
    return sources


def name_of(file: h5py.File, key: str) -> str:
    """The name of a data key's dataset in this file; the one that h5py gives may be a name in another file, if it is a link."""
    return "/inputs" if key == "data" and "inputs" in file else f"/targets/data/{key}"


def member(path: Path, file: h5py.File, name: str) -> h5py.Group | h5py.Dataset:
    """The group or dataset with a name that `check_links` has checked. Raises: DataError, if it does not exist."""
    folder, _, last = name.rpartition("/")
    parent = file[folder] if folder else file
    if last not in parent:
        raise DataError(f"{path}: expected /{name}, got only {names_in(parent)} in {parent.name}")
    return parent[last]


def dataset_in(path: Path, file: h5py.File, name: str) -> h5py.Dataset:
    """A dataset of numbers or strings with frames, labels or sequences on its first axis. Raises: DataError."""
    dataset = member(path, file, name)
    return check_stored(path, name, dataset, file_size(dataset))


def check_stored(path: Path, name: str, dataset: h5py.Group | h5py.Dataset, size: int) -> h5py.Dataset:
    """The dataset, after checking its type and shape, and that its values are stored.

    Args:
        size: bytes of the file that contains it.

    Raises:
        DataError: it is not such a dataset, or the file does not contain the values that it claims to have.
    """
    if not isinstance(dataset, h5py.Dataset):
        raise DataError(f"{path}: expected /{name} to be a dataset, got a group")
    if not dataset.shape:
        raise DataError(f"{path}: expected /{name} to have a first axis to count on, got a scalar")
    try:
        dtype = dataset.dtype
    except TypeError as error:  # a type of HDF5 without a counterpart in numpy
        raise DataError(f"{path}: expected numbers or strings in /{name}, got {error}") from None
    if dtype.kind not in "biufc" and h5py.check_string_dtype(dtype) is None:
        raise DataError(f"{path}: expected numbers or strings in /{name}, got dtype {dtype}")
    if 0 in dataset.shape[1:]:
        raise DataError(f"{path}: expected values in every row of /{name}, got the shape {dataset.shape}")
    if dataset.shape[0] and not (dataset.external or dataset.is_virtual) and not _is_stored(dataset, size):
        raise DataError(
            f"{path}: expected the values of /{name}, {dtype} of shape {dataset.shape}, {_claimed_bytes(dataset)} bytes, "
            f"got only {dataset.id.get_storage_size()} bytes in {size} of the file (it was cut off or never written completely)"
        )
    return dataset


def file_size(member: h5py.Group | h5py.Dataset) -> int:
    """The size in bytes of the file that contains a member, which may differ from the file that it was looked up in."""
    return os.fstat(h5py.h5i.get_file_id(member.id).get_vfd_handle()).st_size


MANY_CHUNKS = 2000
"""If a dataset has more chunks than this, only some are looked up: counting takes 0.2 microseconds per chunk."""

SOME_CHUNKS = 16

LEAST_CHUNK = 9
"""The least bytes that a compressed chunk takes in a file: its address, and one byte of data."""


def _is_stored(dataset: h5py.Dataset, size: int) -> bool:
    """Whether the file seems to contain the values that a dataset claims to have: a quick check, before memory is allocated for
    them. HDF5 would read zeros for values that were never written."""
    chunks = dataset.chunks
    if chunks is None:
        stored = dataset.id.get_storage_size()
        is_enough = not dataset.dtype.hasobject and stored >= prod(dataset.shape) * dataset.dtype.itemsize
        if not is_enough and stored < _claimed_bytes(dataset):  # the type in the file, which is slower to look up, may be smaller
            return False
        offset = dataset.id.get_offset()
        return bool((offset or 0) + stored <= size)  # no offset: they are in the header
    claimed = [-(-extent // chunk) for extent, chunk in zip(dataset.shape, chunks, strict=True)]
    number = prod(claimed)
    plain = dataset.id.get_create_plist().get_nfilters() == 0
    if (_claimed_bytes(dataset) if plain else number * LEAST_CHUNK) > size:
        return False
    if number <= MANY_CHUNKS:
        return bool(dataset.id.get_num_chunks() == number)
    for number_of_chunk in {number * sample // (SOME_CHUNKS - 1) - (sample == SOME_CHUNKS - 1) for sample in range(SOME_CHUNKS)}:
        where = numpy.unravel_index(number_of_chunk, claimed)
        try:
            dataset.id.read_direct_chunk(tuple(int(index) * chunk for index, chunk in zip(where, chunks, strict=True)))
        except (OSError, RuntimeError, ValueError):  # the chunk was never written
            return False
    return True


def _claimed_bytes(dataset: h5py.Dataset) -> int:
    """The bytes of a dataset's values, without compression."""
    return int(prod(dataset.shape) * dataset.id.get_type().get_size())


def strings_in(path: Path, file: h5py.File, name: str) -> h5py.Dataset:
    """A dataset of strings with one axis. Raises: DataError."""
    dataset = dataset_in(path, file, name)
    if dataset.ndim != 1 or h5py.check_string_dtype(dataset.dtype) is None:
        raise DataError(f"{path}: expected strings of shape (number,) in /{name}, got {dataset.dtype} {dataset.shape}")
    return dataset


def lengths_in(path: Path, file: h5py.File, sources: dict[str, h5py.Dataset]) -> dict[str, Array]:
    """/seqLengths by data key: int32 of shape (num_sequences,). Read in blocks, as it may be stored as int64. Raises:
    DataError."""
    stored = dataset_in(path, file, "seqLengths")
    if stored.ndim not in (1, 2) or stored.dtype.kind not in "iu":
        raise DataError(f"{path}: expected integers of shape (sequences, keys) in /seqLengths, got {stored.dtype} {stored.shape}")
    number = len(sources) if stored.ndim == 1 else stored.shape[1]  # in the oldest files: one length for all keys
    # A file without /targets may have a column for targets that are not there, for historical reasons.
    allowed = {len(sources)} | ({len(sources) + 1} if "targets" not in file else set())
    if number not in allowed:
        raise DataError(f"{path}: expected {len(sources)} columns in /seqLengths (for {', '.join(sources)}), got {number}")
    lengths = {key: numpy.empty(len(stored), dtype=numpy.int32) for key in sources}
    for start in range(0, len(stored), ROWS_AT_ONCE):
        block: Array = stored[start : start + ROWS_AT_ONCE]
        if block.min() < 0:
            raise DataError(f"{path}: expected lengths of 0 or more in /seqLengths, got {block.min()}")
        if block.max() > numpy.iinfo(numpy.int32).max:
            raise DataError(f"{path}: expected lengths below 2**31 in /seqLengths, got {block.max()}")
        for column_number, column in enumerate(lengths.values()):
            column[start : start + len(block)] = block if block.ndim == 1 else block[:, column_number]
    return lengths


def stream_of(path: Path, file: h5py.File, key: str, dataset: h5py.Dataset) -> Stream:
    """The stream of a dataset. Integers without a feature axis are sparse, as in RETURNN. Raises: DataError."""
    sparse = dataset.ndim == 1 and dataset.dtype.kind in "iu"
    if name_of(file, key) == "/inputs":
        dim = dataset.shape[-1] if dataset.ndim > 1 else _integer(path, "inputPattSize of /", file.attrs.get("inputPattSize", 1))
        labels = "labels"
    else:
        size = member(path, file, "targets/size").attrs.get(key)
        dim = _integer(path, f"{key} of /targets/size", size)
        labels = f"targets/labels/{key}"
    names = tuple(texts_of(path, f"/{labels}", strings_in(path, file, labels)[:])) if labels in file else ()
    if dataset.dtype.kind not in "biufc" and dataset.ndim > 1:
        raise DataError(f"{path}: expected texts of shape (frames,) in {name_of(file, key)}, got the shape {dataset.shape}")
    # As in batches; see `pad`. Texts are as such, whether HDF5 stores them with one length or each with its own.
    dtype = dataset.dtype.newbyteorder("=") if dataset.dtype.kind in "biufc" else numpy.dtype(object)
    return Stream(dtype, tuple(dataset.shape[1:]), int(dim), sparse, names if names != ("dummy-label",) else ())


def mapped_array(path: Path, dataset: h5py.Dataset, maps: dict[Path, mmap.mmap]) -> Array | None:
    """The dataset as a memory-mapped array, or None if its layout does not allow it."""
    if (
        dataset.external
        or dataset.is_virtual
        or dataset.dtype.kind not in "biufc"
        or not dataset.dtype.isnative
        or dataset.chunks is not None
    ):
        return None
    if dataset.id.get_type() != h5py.h5t.py_create(
        dataset.dtype, logical=True
    ):  # h5py converts a type without a counterpart in numpy
        return None
    if dataset.size == 0:
        return numpy.zeros(dataset.shape, dtype=dataset.dtype)
    offset = dataset.id.get_offset()
    if offset is None:  # stored in the header
        return None
    # Not a numpy.memmap: a slice of a plain array is several times faster, and each memmap would hold another descriptor.
    file_path = path if dataset.file.filename == str(path) else Path(dataset.file.filename)  # a link may lead to another file
    if file_path not in maps:
        with file_path.open("rb") as opened:
            maps[file_path] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    return numpy.frombuffer(maps[file_path], dataset.dtype, dataset.size, offset).reshape(dataset.shape)


def _integer(path: Path, name: str, value: Any) -> int:
    """The integer, or the first of several, of an attribute. Raises: DataError."""
    numbers = numpy.ravel(value)
    if numbers.dtype.kind not in "iu" or not len(numbers):
        raise DataError(f"{path}: expected an integer as attribute {name}, got {value!r}")
    if not 0 <= int(numbers[0]) < 2**31:
        raise DataError(f"{path}: expected a number of dimensions or classes below 2**31 as attribute {name}, got {numbers[0]}")
    return int(numbers[0])


def text_of(value: bytes | str) -> str:
    """A stored string, decoded from UTF-8 and without the zero bytes that some writers pad it with. Raises: UnicodeError."""
    text = value.decode("utf-8") if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape").decode("utf-8")
    return text.split("\0", 1)[0]


def texts_of(path: Path, name: str, values: Iterable[bytes | str]) -> list[str]:
    """Stored strings of the member `name`. Raises: DataError, if one is not UTF-8."""
    texts = []
    for value in values:
        try:
            texts.append(text_of(value))
        except UnicodeError:
            raise DataError(f"{path}: expected text in UTF-8 in {name}, got {value!r}") from None
    return texts


def names_in(group: Any) -> str:
    """The names of a group's members, for a message; only the first ones of many."""
    names = [f"'{name}'" for name in islice(group, 9)] if isinstance(group, (h5py.Group, dict)) else []
    more = ["..."] if len(names) == 9 else []
    return ", ".join(names[:8] + more) or "nothing"


def check_links(path: Path, file: h5py.File, name: str, external: External) -> None:
    """Check the links on the path to a member, if it exists.

    Raises:
        DataError: a link leads to another file and `external` is 'refuse', or its target is missing.
    """
    parent: h5py.Group | h5py.Dataset = file
    for entry in name.split("/"):
        if not isinstance(parent, h5py.Group) or entry not in parent:
            return
        parent = follow_link(path, parent, entry, name, external)


def follow_link(path: Path, parent: h5py.Group, entry: str, name: str, external: External) -> h5py.Group | h5py.Dataset:
    """The member `entry` of a group, after checking its links. Raises: as `check_links`; KeyError, if it does not exist.

    Args:
        name: of the whole path, for messages.
    """
    link = parent.get(entry, getlink=True)
    outside = isinstance(link, h5py.ExternalLink)
    soft = isinstance(link, h5py.SoftLink)  # the latter may lead to one outside
    if outside and external == "refuse":
        raise DataError(f"{path}: expected /{name} to be in this file, got a link to another file ({HINT})")
    try:
        member = parent[entry]
    except (KeyError, OSError, RuntimeError) as error:
        if outside or soft:
            target = f"{link.path} in {link.filename}" if outside else link.path
            raise DataError(f"{path}: expected {target}, the target of the link /{name}, got: {error}") from None
        raise
    if soft and external == "refuse" and member.file != parent.file:
        raise DataError(f"{path}: expected /{name} to be in this file, got a link to another file ({HINT})")
    if isinstance(member, h5py.Dataset) and (member.external or member.is_virtual):
        if external == "refuse":
            raise DataError(
                f"{path}: expected /{name} to be stored in this file, got a dataset whose values are stored in other "
                f"files ({HINT})"
            )
        _check_sources(path, member)
    return member


def _check_sources(path: Path, dataset: h5py.Dataset) -> None:
    """Check that the other files exist and are long enough: HDF5 would silently read zeros. Raises: DataError."""
    for name, offset, size in dataset.external or ():
        bytes_there = Path(name).stat().st_size if Path(name).is_file() else None  # as in HDF5, relative to the working directory
        if bytes_there is None or (size != h5py.h5f.UNLIMITED and bytes_there < offset + size):
            got = "no such file" if bytes_there is None else f"{bytes_there} bytes"
            raise DataError(f"{path}: expected {name} with {offset + size} bytes, where {dataset.name} is stored, got: {got}")


def virtual_files(path: Path, dataset: h5py.Dataset) -> Iterator[Path]:
    """The other files with the parts of a virtual dataset. HDF5 silently reads zeros for a part whose file it cannot open at the
    moment: keep them open. Raises: DataError, if a part is not there."""
    if not dataset.is_virtual:
        return
    folder = Path(dataset.file.filename).parent
    covered = 0.0
    for source in dataset.virtual_sources():
        where = f"{source.dset_name} in {source.file_name} as a part of {dataset.name}"
        if source.file_name == ".":
            if source.dset_name not in dataset.file:
                raise DataError(f"{path}: expected {where}, got none")
            covered += _check_part(path, source, dataset.file[source.dset_name], where)
            continue
        is_pattern = "%b" in source.file_name  # of the names of any number of files
        for number in count() if is_pattern else (0,):
            name = source.file_name.replace("%b", str(number))
            source_path = next((source_path for source_path in (folder / name, Path(name)) if source_path.is_file()), None)
            if is_pattern and source_path is None:
                break
            if source_path is None:
                raise DataError(f"{path}: expected {where}, got none")
            yield source_path
            with open_file(source_path) as source_file:
                if source.dset_name not in source_file:
                    raise DataError(f"{path}: expected {where}, got none")
                source_dataset = source_file[source.dset_name]
                yield from virtual_files(path, source_dataset)
                covered += _check_part(path, source, source_dataset, where)
    if covered < dataset.size:
        raise DataError(f"{path}: expected parts with all {dataset.size} values of {dataset.name}, got {covered:.0f}")


def _check_part(path: Path, source: Any, dataset: h5py.Dataset, where: str) -> float:
    """The number of values of a part of a virtual dataset; infinity: any. Raises: DataError, if they are not all stored."""
    check_stored(path, where, dataset, file_size(dataset))
    try:
        number = source.vspace.get_select_npoints()
        if source.src_space.get_select_type() == h5py.h5s.SEL_ALL:
            is_whole = dataset.size == number
        else:
            _, last = source.src_space.get_select_bounds()
            is_whole = all(end < size for end, size in zip(last, dataset.shape, strict=True))
    except RuntimeError:  # a part that grows
        return float("inf")
    if not is_whole:
        raise DataError(f"{path}: expected {where} with all of its {number} values, got the shape {dataset.shape} there")
    return float(number)
