"""An API server that knows EndpointSlices: list, watch with versions and bookmarks, 410, and trouble on demand."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition
from typing import Any
from urllib.parse import parse_qs, urlsplit

Slice = dict[str, Any]


class FakeKubernetes(ThreadingHTTPServer):
    """Keeps slices and all that happened to them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.version = 100
        self.slices: dict[str, Slice] = {}
        self.events: list[tuple[int, dict[str, Any]]] = []
        self.oldest = 0
        """A watch from before this version is 410."""
        self.status = 0
        """Answer everything with it; 0: as usual."""
        self.epoch = 0
        """Growing it ends all watches."""
        self.changed = Condition()
        self.requests: list[tuple[str, dict[str, str], str]] = []
        """Path, parameters, authorization."""

    def put(self, name: str, endpoints: list[dict[str, Any]], ports: list[dict[str, Any]]) -> None:
        """Make or change a slice."""
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self._happen(kind, {"metadata": {"name": name}, "endpoints": endpoints, "ports": ports})

    def delete(self, name: str) -> None:
        self._happen("DELETED", self.slices[name])

    def bookmark(self) -> None:
        self._happen("BOOKMARK", {"metadata": {}})

    def end_watches(self) -> None:
        with self.changed:
            self.epoch += 1
            self.changed.notify_all()

    def _happen(self, kind: str, item: Slice) -> None:
        with self.changed:
            self.version += 1
            item = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self.version)}}
            if kind == "DELETED":
                del self.slices[item["metadata"]["name"]]
            elif kind != "BOOKMARK":
                self.slices[item["metadata"]["name"]] = item
            self.events.append((self.version, {"type": kind, "object": item}))
            self.changed.notify_all()


class _Handler(BaseHTTPRequestHandler):
    server: FakeKubernetes
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        parameters = {name: values[0] for name, values in parse_qs(url.query).items()}
        epoch = self.server.epoch  # before the status, so that no watch outlives both being changed
        self.server.requests.append((url.path, parameters, self.headers.get("Authorization", "")))
        if self.server.status:
            self.send_error(self.server.status)
        elif parameters.get("watch"):
            self._watch(int(parameters["resourceVersion"]), epoch)
        else:
            with self.server.changed:
                content = {
                    "kind": "EndpointSliceList",
                    "metadata": {"resourceVersion": str(self.server.version)},
                    "items": list(self.server.slices.values()),
                }
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def _watch(self, since: int, epoch: int) -> None:
        server = self.server
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if since < server.oldest:
            gone = {"kind": "Status", "code": 410, "message": f"too old resource version: {since}"}
            self._say({"type": "ERROR", "object": gone})
        else:
            while server.epoch == epoch:
                with server.changed:
                    new = [event for version, event in server.events if version > since]
                    if not new:
                        server.changed.wait(0.2)
                for event in new:
                    since = int(event["object"]["metadata"]["resourceVersion"])
                    self._say(event)
        self.wfile.write(b"0\r\n\r\n")

    def _say(self, event: dict[str, Any]) -> None:
        line = json.dumps(event).encode() + b"\n"
        middle = len(line) // 2  # events come in pieces
        for piece in (line[:middle], line[middle:]):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.flush()
