"""What the admin port answers."""

import json
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

from deepinfer_router.admin_http import AdminAnswer, AdminRequest
from deepinfer_router.channel import Message
from deepinfer_router.exposition import CONTENT_TYPE, expose
from deepinfer_router.metrics import Snapshot
from deepinfer_router.status_view import status_view

_TEXT = "text/plain; charset=utf-8"
FRESH_S = 0.5
"""How long workers are waited for; after that their last report counts."""


class Desk(Protocol):
    """What is asked of the supervisor, from any thread."""

    draining: bool
    started_at: float

    def fresh_reports(self, patience_s: float) -> list[Message]: ...
    def metrics(self) -> Snapshot: ...
    def reports(self) -> list[Message]: ...
    def autoscale(self, reports: list[Message]) -> dict[str, Any]: ...
    def drain_engine(self, engine: str, on: bool) -> None: ...
    def why_unhealthy(self) -> str: ...


class Admin:
    """Routes of the admin port. Thread-safe."""

    def __init__(self, desk: Desk, token: str | None = None) -> None:
        """`token`: what changes need; None: they are taken from this host alone."""
        self._desk = desk
        self._token = token
        self._pages: dict[str, Callable[[], AdminAnswer]] = {
            "/": self._page,
            "/metrics": self._metrics,
            "/health": self._health,
            "/ready": self._ready,
            "/status": lambda: _json(self._status()),
            "/engines": lambda: _json(self._status()["engines"]),
            "/autoscale": lambda: _json(self._status()["autoscale"]),
        }

    def __call__(self, request: AdminRequest) -> AdminAnswer:
        """One request's answer; never raises."""
        try:
            return self._answer(request)
        except Exception as error:
            return AdminAnswer(500, _TEXT, f"{type(error).__name__}: {error}\n".encode())

    def _answer(self, request: AdminRequest) -> AdminAnswer:
        page = self._pages.get(request.path)
        if page:
            return page() if request.method in ("GET", "HEAD") else AdminAnswer(405, _TEXT, b"GET it\n")
        what, _, rest = request.path.removeprefix("/").partition("/")
        engine, _, action = rest.rpartition("/")
        if what == "engines" and action in ("drain", "undrain"):
            return self._drain(request, unquote(engine), action == "drain")
        return AdminAnswer(404, _TEXT, f"there are {', '.join(self._pages)}, /engines/ID/drain\n".encode())

    def _drain(self, request: AdminRequest, engine: str, on: bool) -> AdminAnswer:
        if request.method != "POST":
            return AdminAnswer(405, _TEXT, b"POST it\n")
        if refusal := self._refusal(request):
            return AdminAnswer(403, _TEXT, f"{refusal}\n".encode())
        known = [known["id"] for known in self._status()["engines"]]
        if engine not in known:
            return AdminAnswer(404, _TEXT, f"no engine {engine!r}: there are {', '.join(known)}\n".encode())
        self._desk.drain_engine(engine, on)
        return _json({"engine": engine, "drained": on})

    def _refusal(self, request: AdminRequest) -> str:
        if self._token:
            scheme, _, shown = request.headers.get("authorization", "").partition(" ")
            from hmac import compare_digest  # 4 MB that only this needs

            right = scheme.lower() == "bearer" and compare_digest(shown.encode(), self._token.encode())
            return "" if right else "changes need admin.token as a Bearer token"
        # A page of another site, open in a browser on this host, would come from loopback too.
        if "origin" in request.headers:
            origin, host = request.headers["origin"].partition("://")[2], request.headers.get("host")
            if origin != host or origin.rpartition(":")[0] not in ("127.0.0.1", "[::1]", "localhost"):
                return "changes from another site's page are not taken"
        return "" if ip_address(request.peer).is_loopback else "changes are taken from this host, or set admin.token"

    def _metrics(self) -> AdminAnswer:
        self._desk.autoscale(self._desk.fresh_reports(FRESH_S))
        return AdminAnswer(200, CONTENT_TYPE.decode(), expose(self._desk.metrics()))

    def _health(self) -> AdminAnswer:
        why = self._desk.why_unhealthy()
        return AdminAnswer(503 if why else 200, _TEXT, f"{why or 'ok'}\n".encode())

    def _ready(self) -> AdminAnswer:
        reports = self._desk.reports()
        reasons = [report.get("why_not_ready", "starting") for report in reports if report["ready"]]
        why = ""
        if self._desk.draining:
            why = "draining"
        elif not reasons:
            why = "no worker serves yet"
        elif all(reasons):
            why = reasons[0]
        return AdminAnswer(503 if why else 200, _TEXT, f"{why or 'ready'}\n".encode())

    def _status(self) -> dict[str, Any]:
        reports = self._desk.fresh_reports(FRESH_S)
        return {
            "draining": self._desk.draining,
            "started_at": self._desk.started_at,
            **status_view(reports, self._desk.metrics()),
            "autoscale": self._desk.autoscale(reports),
        }

    def _page(self) -> AdminAnswer:
        page = Path(__file__).with_name("status_page.html").read_bytes()
        return AdminAnswer(200, "text/html; charset=utf-8", page)


def _json(content: Any) -> AdminAnswer:
    return AdminAnswer(200, "application/json", json.dumps(content).encode() + b"\n")
