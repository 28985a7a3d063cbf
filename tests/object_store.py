"""An object store on this machine: moto's S3 server behind a proxy that records requests and can break them."""

import http.client
import os
import threading
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

BUCKET = "bucket"
HOP_BY_HOP = ("connection", "transfer-encoding", "content-length", "expect", "x-direct")
"""Headers that the proxy does not hand on."""

DIRECT = {
    "X-Direct": "1",
    "x-amz-acl": "public-read",
    "Content-Type": "application/octet-stream",
    "Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=none",
}
"""The headers of the tests' own requests, whose signature the server does not check."""

STALLED = 30.0
"""Seconds for which a stalled answer stands still at most."""


@dataclass(frozen=True)
class Request:
    """A request to the store.

    Attributes:
        path: the object, without the bucket.
        part: its header Range, or its query.
        number: how many requests of the same kind came before it.
    """

    method: str
    path: str
    part: str
    number: int


@dataclass
class ObjectStore:
    """A running store.

    Attributes:
        address: of the proxy.
        fault: what goes wrong with a request: 'refuse' (status 503), 'cut' (the connection ends in the middle of the answer),
            'stall' (it stands still there), 'lose' (the request arrives, but the answer does not), '' (nothing).
        answered: how often a request of each kind was answered completely.
    """

    address: str = ""
    fault: Callable[[Request], str] = lambda request: ""
    seen: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    answered: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    end: threading.Event = field(default_factory=threading.Event)

    def url(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}"

    def put(self, name: str, content: bytes) -> str:
        """Store an object; return its URL. Not through the proxy's faults and records."""
        self.ask("PUT", name, content)
        return self.url(name)

    def get(self, name: str) -> bytes:
        return self.ask("GET", name)

    def names(self) -> list[str]:
        """The objects."""
        listing = self.ask("GET", "").decode()
        return [urllib.parse.unquote(part.partition("</Key>")[0]) for part in listing.split("<Key>")[1:]]

    def clear(self) -> None:
        """Remove all objects, faults and records."""
        for name in self.names():
            self.ask("DELETE", name)
        self.fault = lambda request: ""
        self.forget()

    def forget(self) -> None:
        """Forget the requests so far."""
        self.seen.clear()
        self.answered.clear()

    def fetched(self, name: str) -> list[int]:
        """How often each range of an object was answered completely."""
        return [
            count for (method, path, part), count in sorted(self.answered.items()) if (method, path) == ("GET", name) and part
        ]

    def ask(self, method: str, name: str, content: bytes | None = None) -> bytes:
        request = urllib.request.Request(
            f"{self.address}/{BUCKET}/{urllib.parse.quote(name)}", data=content, method=method, headers=DIRECT
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            return bytes(answer.read())


def handler_of(store: ObjectStore, port: int) -> type[BaseHTTPRequestHandler]:
    """What answers requests: the server on a port of this machine, and what shall go wrong."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def answer(self) -> None:
            path, _, query = self.path.partition("?")
            name = urllib.parse.unquote(path.removeprefix(f"/{BUCKET}").lstrip("/"))
            kind = (self.command, name, self.headers.get("Range", query))
            fault = ""
            is_direct = self.headers.get("X-Direct") is not None
            if not is_direct:
                fault = store.fault(Request(*kind, store.seen[kind]))
                store.seen[kind] += 1
            body = self.body()
            if fault == "refuse":
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            server = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            headers = {key: value for key, value in self.headers.items() if key.lower() not in HOP_BY_HOP}
            server.request(self.command, self.path, body, headers)
            answer = server.getresponse()
            content = answer.read()
            if fault == "lose":
                self.close_connection = True
                return
            self.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in ("transfer-encoding", "connection", "date", "server", "content-length"):
                    self.send_header(key, value)
            length = answer.getheader("Content-Length", str(len(content))) if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if fault else content)
            self.wfile.flush()
            if fault == "stall":
                store.end.wait(STALLED)
            if fault:
                self.close_connection = True
            elif not is_direct and answer.status < 300:
                store.answered[kind] += 1

        def body(self) -> bytes | None:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers["Content-Length"])) if "Content-Length" in self.headers else None
            content = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

    return Handler


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: Any) -> None:
        """Who asked has hung up."""


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A store with an empty bucket, which fsspec's s3:// finds in the environment."""
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    store = ObjectStore()
    proxy = Server(("127.0.0.1", 0), handler_of(store, moto.get_host_and_port()[1]))
    store.address = f"http://127.0.0.1:{proxy.server_port}"
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    environment = {
        "AWS_ENDPOINT_URL": store.address,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with mock.patch.dict(os.environ, environment):
        S3FileSystem.clear_instance_cache()  # those of a former store in this process
        store.ask("PUT", "")
        try:
            yield store
        finally:
            store.end.set()
            proxy.shutdown()
            proxy.server_close()
            moto.stop()
