"""Files on object storage: whatever goes wrong on the way, a copy is complete or there is none."""

import os
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy
import pytest
from launching import faults
from object_store import BUCKET, ObjectStore, Request
from opened_data import opened

from hvdtrain.data.remote import is_remote
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.plugins.copies.folder import CopyFolder, copy_files
from hvdtrain.plugins.hdf_tools.dump import main as dump
from hvdtrain.plugins.remote import files as remote
from hvdtrain.plugins.remote.files import RemoteFile, package_problems
from hvdtrain.settings import read_settings

BLOCK = 64 << 10
CONTENT = numpy.random.default_rng(1).bytes(5 * BLOCK + 17)


def nothing(_: int) -> None:
    pass


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BYTES_AT_ONCE", BLOCK)


def first_block(request: Request) -> bool:
    return request.method == "GET" and request.part == f"bytes=0-{BLOCK - 1}"


def test_every_block_is_fetched_once_whatever_goes_wrong(store: ObjectStore, tmp_path: Path) -> None:
    url = store.put("train.tar", CONTENT)
    broken = {f"bytes={number * BLOCK}-{(number + 1) * BLOCK - 1}": how for number, how in enumerate(["refuse", "cut", "stall"])}
    store.fault = lambda request: broken.get(request.part, "") if request.number == 0 else ""
    reports: list[int] = []
    copies = copy_files(CopyFolder(tmp_path, None), [url], reports.append)
    path = Path(copies.places[url])
    assert path.read_bytes() == CONTENT
    assert path.name.endswith("-train.tar")
    assert (copies.num_new, copies.size, reports[-1]) == (1, len(CONTENT), len(CONTENT))
    assert store.fetched("train.tar") == [1] * 6
    assert sum(store.seen[kind] for kind in store.seen if kind[2].startswith("bytes")) == 9  # each broken one once more


@pytest.mark.parametrize("how", ["cut", "stall", "refuse", "lose"])
def test_a_server_that_stays_broken_is_an_error_and_leaves_no_copy(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(remote, "TIMEOUT", 0.3)
    monkeypatch.setattr(remote, "PAUSES", (0.01,))
    url = store.put("train.tar", CONTENT)
    store.fault = lambda request: how if first_block(request) else ""
    with pytest.raises(
        DataError, match=rf"^s3://{BUCKET}/train.tar: expected a file that can be read, got: .*\(tried 2 times\)$"
    ):
        copy_files(CopyFolder(tmp_path, None), [url], nothing)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(("process-", ".lock"))] == []


def test_what_would_fail_again_fails_at_once(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"^s3://{BUCKET}/none.hdf: expected a file that can be read, got: no such file$"):
        copy_files(CopyFolder(tmp_path, None), [store.url("none.hdf")], nothing)
    store.put("folder/a.hdf", b"a")
    with pytest.raises(DataError, match=rf"^s3://{BUCKET}/folder: expected a file, got a folder$"):
        copy_files(CopyFolder(tmp_path, None), [store.url("folder")], nothing)
    with pytest.raises(DataError, match="^nowhere://a: expected a URL that fsspec can read, got: Protocol not known: nowhere"):
        RemoteFile("nowhere://a").size_and_version()


def test_a_file_that_changes_on_the_way_is_an_error(store: ObjectStore, tmp_path: Path) -> None:
    url = store.put("train.tar", CONTENT)

    def replace(request: Request) -> str:
        if first_block(request):
            store.put("train.tar", CONTENT[::-1])
        return ""

    store.fault = replace
    with pytest.raises(DataError, match="expected a file that does not change while it is copied, got one that was changed"):
        copy_files(CopyFolder(tmp_path, None), [url], nothing)
    store.fault = lambda request: ""
    copied = copy_files(CopyFolder(tmp_path, None), [url], nothing)
    assert Path(copied.places[url]).read_bytes() == CONTENT[::-1]
    store.put("train.tar", CONTENT)  # of the same size
    again = copy_files(CopyFolder(tmp_path, None), [url], nothing)
    assert Path(again.places[url]).read_bytes() == CONTENT


def test_a_file_of_a_server_without_etags_is_copied_anew_when_it_changed(tmp_path: Path) -> None:
    (tmp_path / "www").mkdir()
    original = tmp_path / "www" / "train.tar"
    handler = partial(SimpleHTTPRequestHandler, directory=str(original.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/train.tar"
        for content, changed in ((b"before", 1e9), (b"behind", 2e9)):
            original.write_bytes(content)
            os.utime(original, (changed, changed))
            assert Path(copy_files(CopyFolder(tmp_path / "near", None), [url], nothing).places[url]).read_bytes() == content
        original.write_bytes(CONTENT)
        with pytest.raises(DataError, match=r"expected a server that sends parts of a file \(Range\), got 327697 bytes for"):
            copy_files(CopyFolder(tmp_path / "near", None), [url], nothing)
        server.shutdown()
        thread.join()


def test_the_processes_of_a_host_share_out_the_files(store: ObjectStore, tmp_path: Path) -> None:
    urls = [store.put(f"{number}.tar", CONTENT[number:]) for number in range(6)]
    made: dict[int, int] = {}
    barrier = threading.Barrier(3)

    def copy(local_rank: int) -> None:
        folder = CopyFolder(tmp_path, None)
        barrier.wait()
        copies = copy_files(folder, urls, nothing, local_rank, 3)
        assert [Path(copies.places[url]).read_bytes() for url in urls] == [CONTENT[number:] for number in range(6)]
        made[local_rank] = copies.num_new

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(made.values()) == 6
    assert min(made.values()) >= 1
    assert [store.fetched(f"{number}.tar") for number in range(6)] == [[1] * 6] * 6


def test_no_room_for_a_remote_file_is_an_error(store: ObjectStore, tmp_path: Path) -> None:
    url = store.put("train.tar", CONTENT)
    with pytest.raises(DataError, match=rf"^{url}: expected a copy on a local disk, got none: no room for 320.0 KB in "):
        copy_files(CopyFolder(tmp_path, 1000), [url], nothing)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=rf"^{url}: expected a copy on a local disk, got none: cannot write to "):
        copy_files(CopyFolder(tmp_path / "file" / "cache", None), [url], nothing)


def test_files_of_web_servers_and_of_fsspecs_own_systems(store: ObjectStore, tmp_path: Path) -> None:
    store.put("train.tar", CONTENT)
    url = f"{store.address}/{BUCKET}/train.tar?signature=secret"
    store.fault = lambda request: "cut" if first_block(request) and request.number == 0 else ""
    (tmp_path / "far.tar").write_bytes(CONTENT)
    urls = [url, f"file://{tmp_path}/far.tar"]
    copies = copy_files(CopyFolder(tmp_path / "near", None), urls, nothing)
    assert [Path(copies.places[url]).read_bytes() for url in urls] == [CONTENT] * 2
    assert Path(copies.places[url]).name.endswith("-train.tar")
    store.fault = lambda request: "refuse"
    with pytest.raises(DataError, match=r"train.tar: expected a file that can be read, got: status 503"):
        copy_files(CopyFolder(tmp_path / "near", None), [url], nothing)


def test_an_hdf_file_is_trained_on_and_converted_from_its_copy(store: ObjectStore, corpus: Path, tmp_path: Path) -> None:
    url = store.put("corpus/train.hdf", (corpus / "train.hdf").read_bytes())
    value = {"class": "MetaDataset", "datasets": {"a": url}, "data_map": {"data": ("a", "data")}}
    with pytest.raises(
        DataError, match=rf"train.datasets.a: expected a copy of {url} on a local disk, got none \(set cache_dir\)"
    ):
        opened(value)
    copies = copy_files(CopyFolder(tmp_path / "near", None), [url], nothing)
    dataset = opened(value, copies=copies.places)
    expected = opened(str(corpus / "train.hdf"))
    assert numpy.array_equal(dataset.sequence(17)["data"], expected.sequence(17)["data"])
    assert dump([url, str(tmp_path / "out.hdf"), "--cache-dir", str(tmp_path / "near")]) == 0
    assert dump([url, str(tmp_path / "other.hdf")]) == 2
    assert store.fetched("corpus/train.hdf") == [1]


def test_bad_content_is_reported_with_the_url(store: ObjectStore, tmp_path: Path) -> None:
    url = store.put("bad.hdf", b"not HDF")
    copies = copy_files(CopyFolder(tmp_path, None), [url], nothing)
    with pytest.raises(DataError, match=rf"-bad.hdf: expected an HDF5 file, got .* \(a copy of {url}\)$"):
        opened(url, copies=copies.places)


def test_what_remote_files_need_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config: dict[str, object] = {
        "model": str(tmp_path / "model"),
        "learning_rate": 0.1,
        "max_seqs": 10,
        "get_model": lambda **_: None,
        "train_step": lambda **_: None,
        "train": {"class": "HDFDataset", "files": ["s3://bucket/a.hdf"], "allow_external": True},
        "dev": lambda: "https://host/a.hdf?signature=secret",
    }

    def problems(**more: object) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            read_settings([{**config, **more}], {})
        return faults(caught.value.problems)

    assert problems() == ["train.allow_external: conflict"]
    assert problems(train="s3://bucket/a.hdf, s3://bucket/b.hdf") == ["cache_dir: missing"]
    monkeypatch.setattr(remote, "find_spec", lambda name: None)
    assert problems(train="s3://bucket/a.hdf", cache_dir="near") == ["train: missing-package"]
    found = package_problems("train", ["s3://bucket/a.hdf", "hf://datasets/a/b.parquet"])
    assert re.search(r"for s3://, hf://, got none \(pip install fsspec s3fs huggingface_hub\)$", str(found[0]))
    assert not is_remote("C:/a.hdf")
