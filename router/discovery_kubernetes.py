"""Engines of a Kubernetes service: its EndpointSlices, listed once and then watched.

Plain HTTP/1.1 by the standard library in a thread of the supervisor: it is one request that lasts minutes, and clients
of the API bring tens of megabytes. A service account that may `list` and `watch` `endpointslices` of `discovery.k8s.io`
is enough.
"""

import http.client
import json
import os
import random
import ssl
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from deepinfer_router.discovery import Failed, Found, bracketed, plain_engine
from deepinfer_router.errors import RouterConfigError

_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_MAX_LIST_BYTES = 64 << 20
FIRST_BACKOFF_S = 1.0
MOST_BACKOFF_S = 30.0
_GONE = 410


class _ApiError(Exception):
    """The API server cannot be asked, or refuses."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class KubernetesSource:
    """One service."""

    def __init__(self, **section: Any) -> None:
        """`section`: a KubernetesConfig of plain types. Raises RouterConfigError: not in a pod, and no `api` given."""
        self._section = section
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        self._api = urlsplit(section["api"] or (f"https://{bracketed(host)}:{port}" if host else ""))
        if not self._api.hostname:
            raise RouterConfigError("discovery.kubernetes: not in a pod: set api to the API server's URL")
        self._namespace = section["namespace"] or _own_namespace()
        self.name = f"kubernetes {self._namespace}/{section['service']}:{section['port']}"
        self._slices: dict[str, dict[str, Any]] = {}
        self._version = ""  # that the slices are of; empty: they have to be listed

    def run(self, found: Found, failed: Failed, stop: Event) -> None:
        """See `discovery.Source`."""
        backoff_s = FIRST_BACKOFF_S
        while not stop.is_set():
            begun = monotonic()
            try:
                if not self._version:
                    self._list()
                    found(self.engines())
                for changed in self._watch():
                    if changed:
                        found(self.engines())
                    if stop.is_set():
                        return
            except _ApiError as error:
                if error.status != _GONE:  # too old a version is no fault: the list is asked for again
                    failed(str(error))
                self._version = ""
            if self._version and monotonic() - begun > FIRST_BACKOFF_S:
                backoff_s = FIRST_BACKOFF_S
            else:
                stop.wait(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, MOST_BACKOFF_S)

    def engines(self) -> list[dict[str, Any]]:
        """Of all slices known now. A pod that terminates is there to finish what it has."""
        by_id: dict[str, dict[str, Any]] = {}
        for _, found in sorted(self._slices.items()):
            port = self._port(found.get("ports") or [])
            for endpoint in found.get("endpoints") or [] if port else []:
                conditions = endpoint.get("conditions") or {}
                terminating = conditions.get("terminating") is True
                if not terminating and conditions.get("ready") is False:
                    continue
                address = bracketed(endpoint["addresses"][0])  # the API fills in one; more are reserved
                name = (endpoint.get("targetRef") or {}).get("name") or address
                url = f"{self._section['scheme']}://{address}:{port}"
                engine = plain_engine(f"{name}:{port}", url, self._section, draining=terminating)
                if not terminating or engine["id"] not in by_id:
                    by_id[engine["id"]] = engine
        return list(by_id.values())

    def _port(self, ports: list[dict[str, Any]]) -> int | None:
        wanted = self._section["port"]
        for port in ports:
            number = port.get("port")
            if number and (not wanted or wanted in (number, str(number), port.get("name"))):
                return int(number)
        return None

    def _list(self) -> None:
        """Take up all slices."""
        connection, response = self._get({})
        try:
            body = response.read(_MAX_LIST_BYTES)
            content = json.loads(body)
            self._slices = {item["metadata"]["name"]: item for item in content.get("items") or []}
            self._version = content["metadata"]["resourceVersion"]
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise _ApiError(f"{self.name}: not a list of EndpointSlices: {error!r}") from None
        finally:
            connection.close()

    def _watch(self) -> Iterator[bool]:
        """Take up changes; of each event whether slices changed. Ends when the server ends it, as it does in time."""
        parameters = {
            "watch": "1",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": f"{self._section['timeout_s']:.0f}",
        }
        connection, response = self._get(parameters)
        try:
            for line in response:
                event = json.loads(line)
                kind, item = event["type"], event["object"]
                if kind == "ERROR":
                    raise _ApiError(f"{self.name}: {item.get('message', 'watch ended')}", int(item.get("code", 0)))
                if kind == "DELETED":
                    self._slices.pop(item["metadata"]["name"], None)
                elif kind != "BOOKMARK":
                    self._slices[item["metadata"]["name"]] = item
                self._version = item["metadata"]["resourceVersion"]
                yield kind != "BOOKMARK"
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _ApiError(f"{self.name}: the watch broke: {error!r}") from None
        finally:
            connection.close()

    def _get(self, parameters: dict[str, str]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        selector = {"labelSelector": f"kubernetes.io/service-name={self._section['service']}"}
        path = f"/apis/discovery.k8s.io/v1/namespaces/{quote(self._namespace)}/endpointslices"
        connection = self._connection()
        try:
            headers = {"Accept": "application/json"}
            if token := self._token():
                headers["Authorization"] = f"Bearer {token}"
            target = f"{self._api.path.rstrip('/')}{path}?{urlencode({**selector, **parameters})}"
            connection.request("GET", target, headers=headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _ApiError(f"{self.name}: {self._api.netloc}: {error}") from None
        if response.status != 200:
            connection.close()
            hint = {401: ": is the token right?", 403: ": may the service account list and watch endpointslices?"}
            raise _ApiError(
                f"{self.name}: {self._api.netloc}: status {response.status}{hint.get(response.status, '')}",
                response.status,
            )
        return connection, response

    def _connection(self) -> http.client.HTTPConnection:
        host, port = str(self._api.hostname), self._api.port
        timeout_s = self._section["timeout_s"] + 15.0  # the server ends a watch before that; a dead peer is found
        if self._api.scheme != "https":
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        ca_file = self._section["ca_file"]
        try:
            context = ssl.create_default_context(cafile=ca_file if Path(ca_file).exists() else None)
        except (OSError, ssl.SSLError) as error:
            raise _ApiError(f"{self.name}: {ca_file}: {error}") from None
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)

    def _token(self) -> str:
        try:
            return Path(self._section["token_file"]).read_text().strip()  # rotated by the kubelet
        except OSError:
            return ""


def _own_namespace() -> str:
    try:
        return _NAMESPACE.read_text().strip() or "default"
    except OSError:
        return "default"
