"""A place of record files for the remote tests: a local HTTP server that answers range requests, and a file
system of fsspec over it."""

import contextlib
import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fsspec.spec import AbstractFileSystem
from tests.waiting import LIMIT_S

Spoil = Callable[[str, int, int, bytes], "bytes | int | None"]
"""(name, start, end, right answer) -> answer, status of an error, or None: the connection breaks off."""


class RangeServer:
    """Serves `files` by name at `127.0.0.1:port`; counts requests by method."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.spoil: Spoil = lambda _name, _start, _end, right: right
        self.requests = {"GET": 0, "HEAD": 0}
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                server.count("HEAD")
                data = server.files.get(self.path[1:])
                if data is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("ETag", f'"{hash(data):x}"')
                self.end_headers()

            def do_GET(self) -> None:
                server.count("GET")
                name = self.path[1:]
                data = server.files.get(name)
                first, last = self.headers["Range"].removeprefix("bytes=").split("-")
                start, end = int(first), int(last) + 1
                if data is None or start >= len(data):
                    self.send_error(404 if data is None else 416)
                    return
                right = data[start:end]
                answer = server.spoil(name, start, end, right)
                if isinstance(answer, int):
                    self.send_error(answer)
                    return
                body = right if answer is None else answer
                self.send_response(206)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if answer is None:
                    self.wfile.write(body[: len(body) // 2])
                    self.close_connection = True
                else:
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._http.server_address[1])
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def count(self, method: str) -> None:
        with self._lock:
            self.requests[method] += 1

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class RangedFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """URLs ranged://127.0.0.1:PORT/NAME, read only; errors are those of the standard library."""

    protocol = "ranged"
    cachable = False

    def _ask(self, path: str, method: str, **headers: str) -> tuple[dict[str, str], bytes]:
        host, _, name = self._strip_protocol(path).partition("/")
        with contextlib.closing(http.client.HTTPConnection(host, timeout=LIMIT_S)) as connection:
            connection.request(method, f"/{name}", headers={"Connection": "close", **headers})
            with connection.getresponse() as answer:
                if answer.status == 404:
                    raise FileNotFoundError(path)
                if answer.status >= 400:
                    raise OSError(f"{path}: status {answer.status}")
                return dict(answer.headers.items()), answer.read()

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        told, _body = self._ask(path, "HEAD")
        size = int(told["Content-Length"])
        return {"name": path, "type": "file", "size": size, "ETag": told["ETag"]}

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        return self._ask(path, "GET", Range=f"bytes={start}-{end - 1}")[1]
