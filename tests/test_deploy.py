"""What deploy/ has for engines: every metric it names is one, and panels lie beside each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from deepinfer_vllm.eplb import metrics as eplb
from deepinfer_vllm.scheduling import metrics as scheduling
from deepinfer_vllm.spec_decode import metrics as dspark

VLLM_OWN = {
    *("num_requests_running", "prompt_tokens_total", "generation_tokens_total"),
    *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
}


def known() -> set[str]:
    """As Prometheus has them, without `vllm:`."""
    names = set(VLLM_OWN)
    for part in (dspark.DEFINITIONS, eplb.DEFINITIONS, scheduling.DEFINITIONS):
        prefix = part.prefix.removeprefix("vllm:")
        names |= {f"{prefix}{name}_total" for name in (*part.counters, *part.position_counters)}
        names |= {f"{prefix}{name}" for name in part.gauges}
        names |= {f"{prefix}{name}_bucket" for name in part.histograms}
    return names


def test_alerts_of_engines_name_metrics_that_there_are(root: Path) -> None:
    rules = yaml.safe_load((root / "deploy/engine-alerts.yaml").read_text())["groups"][0]["rules"]
    named = {name for rule in rules for name in re.findall(r"vllm:(\w+)", rule["expr"])}
    assert named and named <= known()
    assert all(rule["annotations"]["summary"].endswith((".", ")")) for rule in rules)
    assert len({rule["alert"] for rule in rules}) == len(rules)


def test_the_dashboard_names_metrics_that_there_are(root: Path) -> None:
    text = (root / "deploy/engine-dashboard.json").read_text()
    dashboard = json.loads(text)
    assert {*re.findall(r"vllm:(\w+)", text)} <= known()
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or panel["targets"]
    pages = re.findall(r"docs/\w+\.md", text)
    assert len(pages) == 3


def test_vllm_has_those_that_are_its_own() -> None:
    """Read from vLLM's source: an engine is not needed to know names."""
    from importlib.util import find_spec

    found = find_spec("vllm")
    assert found is not None and found.submodule_search_locations is not None
    source = (Path(found.submodule_search_locations[0]) / "v1/metrics/loggers.py").read_text()
    for name in VLLM_OWN:
        assert f'"vllm:{re.sub("_(total|bucket)$", "", name)}"' in source, name
