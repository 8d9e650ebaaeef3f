"""The reference page, the examples and the alerts say what there is."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepinfer_router import reference
from deepinfer_router.config import RouterConfig
from deepinfer_router.config_source import ConfigSource, checked
from deepinfer_router.startup import prepare


def test_the_page_is_up_to_date(root: Path) -> None:
    remedy = "python -m deepinfer_router.reference > docs/router-reference.md"
    assert (root / "docs/router-reference.md").read_text() == reference.page(), remedy


def test_every_metric_has_a_name_and_a_text_of_its_own() -> None:
    families = reference.metrics()
    names = [family["name"] for family in families]
    assert len(set(names)) == len(names)
    for family in families:
        assert family["name"].startswith("deepinfer_router_"), family
        assert family["help"].endswith(".") and "\n" not in family["help"], family


def test_every_section_is_listed() -> None:
    listed = {name.partition(".")[0].removesuffix("[]") for name, _ in reference.settings()}
    assert listed == set(RouterConfig.model_fields)


def test_the_example_is_a_configuration(root: Path) -> None:
    config, boot = prepare(ConfigSource(root / "examples/router.yaml"))
    assert [engine["ranks"] for engine in boot.engines] == [1, 1, 4, 4]
    assert (config.listen, boot.workers) == ("127.0.0.1:8080", 2)


def test_what_the_example_leaves_out_is_right_too(root: Path) -> None:
    """Every line that begins with `# ` and is YAML of a section, uncommented."""
    text = (root / "examples/router.yaml").read_text()
    sections = "|".join(RouterConfig.model_fields)
    blocks = re.findall(rf"^# (?:{sections}):.*\n(?:^#   .*\n)*", text, re.MULTILINE)
    assert len(blocks) == 4
    settings: dict[str, Any] = {"engines": ["a:1"]}
    for block in blocks:
        settings |= yaml.safe_load(re.sub(r"^# ", "", block, flags=re.MULTILINE))
    assert checked(settings, "example").discovery.any


def test_kubernetes_manifests_hold_a_configuration(root: Path, tmp_path: Path) -> None:
    objects = list(yaml.safe_load_all((root / "deploy/router-kubernetes.yaml").read_text()))
    by_kind = {found["kind"]: found for found in objects}
    path = tmp_path / "router.yaml"
    path.write_text(by_kind["ConfigMap"]["data"]["router.yaml"])
    config = checked(ConfigSource(path).read({"ADMIN_TOKEN": "a token of sixteen"}), "ConfigMap")
    pod = by_kind["Deployment"]["spec"]["template"]["spec"]
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert config.listen.endswith(f":{ports['http']}") and config.admin.listen.endswith(f":{ports['admin']}")
    assert pod["terminationGracePeriodSeconds"] > config.process.drain_s + config.process.unready_s
    assert by_kind["Role"]["rules"][0]["verbs"] == ["list", "watch"]


@pytest.mark.parametrize("file", ["deploy/router-alerts.yaml"])
def test_alerts_name_metrics_that_there_are(root: Path, file: str) -> None:
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    known = {family["name"] + suffix for family in reference.metrics() for suffix in suffixes[family["kind"]]}
    rules = yaml.safe_load((root / file).read_text())["groups"][0]["rules"]
    named = {name for rule in rules for name in re.findall(r"deepinfer_router_\w+", rule["expr"])}
    assert named and named <= known
