"""EndpointSlices of a service, from an API server that can be in trouble."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_kubernetes import FakeKubernetes
from listening_source import listening

from deepinfer_router import discovery_kubernetes
from deepinfer_router.discovery import Source, sources
from deepinfer_router.discovery_config import DiscoveryConfig
from deepinfer_router.errors import RouterConfigError

PORTS = [{"name": "metrics", "port": 9000}, {"name": "http", "port": 8000}]


def pod(name: str, address: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions, "targetRef": {"kind": "Pod", "name": name}}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    monkeypatch.setattr(discovery_kubernetes, "FIRST_BACKOFF_S", 0.02)
    with FakeKubernetes() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.end_watches()
        server.shutdown()


def source(api: FakeKubernetes, **section: Any) -> Source:
    section = {"service": "vllm", "namespace": "llm", "port": "http", "api": api.url, **section}
    config = DiscoveryConfig.model_validate({"kubernetes": [section]})
    (found,) = sources(config.model_dump(mode="json"))
    return found


def test_slices_are_listed_and_watched(api: FakeKubernetes, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t0ken\n")
    api.put("a", [pod("p1", "10.0.0.1", ready=True), pod("p2", "10.0.0.2", ready=False), pod("p3", "fd00::3")], PORTS)
    with listening(source(api, token_file=str(tmp_path / "token"), roles=["prefill"])) as heard:
        heard.until(lambda: heard.sets)
        assert [(engine["id"], engine["url"]) for engine in heard.sets[0]] == [
            ("p1:8000", "http://10.0.0.1:8000"),
            ("p3:8000", "http://[fd00::3]:8000"),
        ]
        assert heard.sets[0][0]["roles"] == ["prefill"]
        api.put("b", [pod("p4", "10.0.0.4", ready=True)], PORTS)
        heard.until(lambda: len(heard.urls()) == 3)
        api.put("a", [pod("p2", "10.0.0.2", ready=True)], PORTS)
        heard.until(lambda: heard.urls() == ["http://10.0.0.2:8000", "http://10.0.0.4:8000"])
        api.delete("b")
        heard.until(lambda: heard.urls() == ["http://10.0.0.2:8000"])
    path, parameters, authorization = api.requests[0]
    assert path == "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
    assert parameters == {"labelSelector": "kubernetes.io/service-name=vllm"}
    assert authorization == "Bearer t0ken"
    assert heard.lines == []


def test_a_pod_that_terminates_gets_no_new_work(api: FakeKubernetes) -> None:
    """vllm-project/production-stack#420: scaling down must not cut what runs."""
    api.put("a", [pod("p1", "10.0.0.1", ready=False, serving=True, terminating=True), pod("p2", "10.0.0.2")], PORTS)
    with listening(source(api)) as heard:
        heard.until(lambda: heard.sets)
    assert [(engine["id"], engine["draining"]) for engine in heard.sets[0]] == [("p1:8000", True), ("p2:8000", False)]


@pytest.mark.parametrize(("port", "number"), [("", 9000), ("http", 8000), (8000, 8000), ("8000", 8000)])
def test_the_port_is_chosen(api: FakeKubernetes, port: object, number: int) -> None:
    api.put("a", [pod("p1", "10.0.0.1")], PORTS)
    with listening(source(api, port=port)) as heard:
        heard.until(lambda: heard.urls() == [f"http://10.0.0.1:{number}"])


def test_without_that_port_there_is_no_engine(api: FakeKubernetes) -> None:
    api.put("a", [pod("p1", "10.0.0.1")], PORTS)
    api.put("b", [], None)  # type: ignore[arg-type] # as the API says that there are none
    with listening(source(api, port="grpc")) as heard:
        heard.until(lambda: heard.sets == [[]])


def test_a_watch_goes_on_where_it_ended(api: FakeKubernetes) -> None:
    api.put("a", [pod("p1", "10.0.0.1")], PORTS)
    with listening(source(api)) as heard:
        heard.until(lambda: heard.sets)
        api.bookmark()
        api.put("a", [pod("p2", "10.0.0.2")], PORTS)
        heard.until(lambda: heard.urls() == ["http://10.0.0.2:8000"])
        api.end_watches()
        api.put("a", [pod("p3", "10.0.0.3")], PORTS)
        heard.until(lambda: heard.urls() == ["http://10.0.0.3:8000"])
    lists = [parameters for _, parameters, _ in api.requests if "watch" not in parameters]
    assert len(lists) == 1 and heard.lines == []


def test_too_old_a_version_is_listed_anew(api: FakeKubernetes) -> None:
    api.put("a", [pod("p1", "10.0.0.1")], PORTS)
    with listening(source(api)) as heard:
        heard.until(lambda: heard.sets)
        with api.changed:
            api.events.clear()
            api.version += 50
            api.oldest = api.version
            api.slices["a"]["endpoints"] = [pod("p9", "10.0.0.9")]
        api.end_watches()
        heard.until(lambda: heard.urls() == ["http://10.0.0.9:8000"])
    assert heard.lines == []


@pytest.mark.parametrize(
    ("status", "hint"), [(500, ""), (401, ": is the token right?"), (403, ": may the service account list and watch")]
)
def test_engines_stay_while_the_api_is_down(api: FakeKubernetes, status: int, hint: str) -> None:
    api.put("a", [pod("p1", "10.0.0.1")], PORTS)
    with listening(source(api)) as heard:
        heard.until(lambda: heard.sets)
        api.status = status
        api.end_watches()
        heard.until(lambda: len(heard.lines) >= 3)
        assert f": status {status}{hint}" in heard.lines[0]
        assert len(heard.sets) == 1
        api.status = 0
        api.put("a", [pod("p2", "10.0.0.2")], PORTS)
        heard.until(lambda: heard.urls() == ["http://10.0.0.2:8000"])


def test_an_api_that_nobody_serves(api: FakeKubernetes) -> None:
    api.url = "http://127.0.0.1:9"
    with listening(source(api)) as heard:
        heard.until(lambda: heard.lines)
    assert heard.lines[0].startswith("kubernetes llm/vllm:http: 127.0.0.1:9: ")
    assert heard.sets == []


def test_outside_a_pod_the_api_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(RouterConfigError, match="not in a pod: set api to the API server's URL"):
        sources(DiscoveryConfig.model_validate({"kubernetes": [{"service": "vllm"}]}).model_dump(mode="json"))
