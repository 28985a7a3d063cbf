"""`hvdtrain report --serve`: a page that follows trainings while they run, for browsers on this machine only."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from hvdtrain.errors import DataError
from hvdtrain.plugins.report import page
from hvdtrain.plugins.report.project import find_trainings, read_project
from hvdtrain.report.ends import ENDS, WRITTEN

LOCAL = "127.0.0.1"

HOSTS = ("127.0.0.1", "localhost")
"""Host names that a request may have: another site's name that resolves to this machine (DNS rebinding) is refused. Any port is
accepted, since an SSH tunnel may use another one."""

FILES = (*WRITTEN, ENDS, "summary.json")
"""The files of a run that a page shows."""

UNCHANGED = 20.0
"""Seconds after which the content is made again even if no file has changed, as a training may have ended without a word, and
after which new trainings are looked for."""


class LivePage:
    """The content of a page about runs, rebuilt when their files have changed.

    Args:
        folders: of the trainings, or above them.
    """

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._lock = threading.Lock()
        self._seen: list[tuple[int, int] | int | None] | None = None
        self._version = ""
        self._json = b""
        self._trainings: list[Path] = []

    def page(self) -> bytes:
        """The page. Raises: DataError, if a file is malformed."""
        project = read_project(self._folders, running=True)
        return page.page(project.runs, project.title, live=True).encode()

    def newer_than(self, version: str) -> bytes | None:
        """The content as JSON; None if `version` is still current. Raises: DataError, if a file is malformed."""
        with self._lock:
            period = int(time.monotonic() / UNCHANGED)
            if self._seen is None or self._seen[0] != period:
                self._trainings = [folder for place in self._folders for folder in find_trainings(place) or [place]]
            now: list[tuple[int, int] | int | None] = [period]
            now += [_file_state(folder / name) for folder in self._trainings for name in FILES]
            if now != self._seen:
                project = read_project(self._folders, running=True)
                content = page.content(project.runs, project.title)
                self._version = content["version"]
                self._json = json.dumps(content, allow_nan=False).encode()
                self._seen = now
            return None if self._version == version else self._json


def _file_state(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_size


def open_server(folders: list[Path], port: int) -> tuple[ThreadingHTTPServer, str]:
    """Open a server on this machine's loopback address.

    Args:
        port: 0 takes a free one.

    Returns:
        The server, and the address of the page. The address contains a random token, since every user of this machine can
        connect to the port. Requests for other addresses get status 404.

    Raises:
        DataError: a folder does not exist, or the port is taken.
    """
    page.plotly_script()  # raises an error now, rather than at the browser's first request, if the package is missing
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise DataError(f"hvdtrain report: expected folders of trainings, got {', '.join(missing)}, which do not exist")
    token = secrets.token_urlsafe(24)
    live_page = LivePage(folders)

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "hvdtrain", ""

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            if self.headers.get("Host", "").rpartition(":")[0] not in HOSTS and self.headers.get("Host") not in HOSTS:
                return self._answer(404)
            if secrets.compare_digest(address.path.encode(), f"/{token}/".encode()):
                return self._content("text/html; charset=utf-8", live_page.page)
            if secrets.compare_digest(address.path.encode(), f"/{token}/data.json".encode()):
                have = parse_qs(address.query).get("have", [""])[0]
                return self._content("application/json", lambda: live_page.newer_than(have))
            return self._answer(404)

        def _content(self, kind: str, make: Callable[[], bytes | None]) -> None:
            try:
                body = make()
            except (DataError, OSError) as error:
                return self._answer(503, f"{error}\n".encode(), "text/plain; charset=utf-8")
            return self._answer(204) if body is None else self._answer(200, body, kind)

        def _answer(self, status: int, body: bytes = b"", kind: str = "text/plain") -> None:
            self.send_response(status)
            headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
            headers |= {"Content-Security-Policy": f"{page.policy()}; frame-ancestors 'none'"}
            headers |= {} if status == 204 else {"Content-Type": kind, "Content-Length": str(len(body))}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the address contains the token."""

    try:
        server = ThreadingHTTPServer((LOCAL, port), Handler)
    except (OSError, OverflowError) as error:
        raise DataError(f"hvdtrain report: expected a free port for --port, got {port}: {error}") from None
    return server, f"http://{LOCAL}:{server.server_port}/{token}/"


def serve(folders: list[Path], port: int, announce: Callable[[str], None]) -> int:
    """Serve a page about runs until Ctrl-C; return the exit status.

    Args:
        announce: receives the address of the page.
    """
    server, address = open_server(folders, port)
    with server:
        try:
            announce(f"{address}  (Ctrl-C ends it)")
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            pass  # this is how users end it
    return 0
