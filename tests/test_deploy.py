"""What deploy/ has for fleets: the systemd unit, the manifest and chart for Kubernetes, the dashboard, Prometheus' configuration."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import gpubpf.__main__
from gpubpf.kernel import privileges
from gpubpf_helm import render

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd/gpubpf-exporter.service"
CHART = DEPLOY / "helm/gpubpf-exporter"
MANIFEST = DEPLOY / "kubernetes/daemonset.yaml"
DASHBOARD = DEPLOY / "grafana/gpubpf.json"
NEEDED = privileges.MEASURING | privileges.PROGRAMS | privileges.JOINING
EXPOSED = 40  # tenths: the exposure that systemd-analyze may find; what is open has its reason in the unit


def needed_capabilities() -> set[str]:
    """The names of the capabilities that the exporter keeps or needs while it attaches."""
    numbers = {
        value: name
        for name, value in vars(privileges).items()
        if re.match("[A-Z]", name) and isinstance(value, int)
    }
    return {numbers[number] for number in NEEDED}


def capabilities_of_unit() -> list[str]:
    lines = re.findall(r"^CapabilityBoundingSet=(.*)$", UNIT.read_text(), re.MULTILINE)
    return [name.removeprefix("CAP_") for line in lines for name in line.split()]


def chart(**changed: Any) -> tuple[Any, Any]:
    """The DaemonSet and the PodMonitor that the chart makes; None for one that it does not make."""
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | changed
    release = {"Name": "gpubpf-exporter", "Namespace": "gpubpf"}
    daemonset, monitor = (
        yaml.safe_load(render((CHART / f"templates/{name}.yaml").read_text(), values, release))
        for name in ("daemonset", "podmonitor")
    )
    return daemonset, monitor


def test_the_unit_has_the_capabilities_that_the_exporter_uses() -> None:
    found = capabilities_of_unit()
    assert len(found) == len({*found}) and {*found} == needed_capabilities()


def test_each_capability_has_its_reason() -> None:
    lines = UNIT.read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        if line.startswith("CapabilityBoundingSet=CAP"):
            assert re.match(r"# [a-z]", before), line


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """The command need not be installed here."""
    text = UNIT.read_text()
    assert "ExecStart=/usr/bin/gpubpf exporter $OPTIONS\n" in text
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace("/usr/bin/gpubpf", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0 and UNIT.name not in done.stderr, done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_the_unit_is_closed(tmp_path: Path) -> None:
    command = ["systemd-analyze", "security", "--no-pager", "--offline=true", f"--threshold={EXPOSED}", UNIT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if "unrecognized option" in done.stderr:
        pytest.skip("systemd is too old for --offline")
    assert done.returncode == 0, done.stdout
    opened = re.sub("=(yes|strict|closed)$", "=no", UNIT.read_text(), flags=re.MULTILINE)
    (tmp_path / UNIT.name).write_text(opened)
    command[-1] = tmp_path / UNIT.name
    assert subprocess.run(command, capture_output=True, timeout=200).returncode != 0, (
        "the limit means something"
    )


def words(text: list[str]) -> Any:
    """What the exporter's command line makes of words. A wrong one ends the test."""
    return gpubpf.__main__.build_parser().parse_args(["exporter", *text])


def test_the_manifest_is_what_the_chart_makes() -> None:
    daemonset, monitor = chart()
    assert yaml.safe_load(MANIFEST.read_text()) == daemonset
    assert monitor is None


def test_the_pods_have_what_the_exporter_needs_and_no_more() -> None:
    daemonset, _ = chart(otlp="http://collector:4317", runtimeClassName="nvidia")
    pod = daemonset["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["gpubpf", "exporter"]
    args = words(container["args"])
    assert args.listen == ("0.0.0.0", container["ports"][0]["containerPort"])
    assert args.otlp == "http://collector:4317" and pod["runtimeClassName"] == "nvidia"
    assert pod["hostPID"] is True and pod["automountServiceAccountToken"] is False
    assert "hostNetwork" not in pod and "hostIPC" not in pod
    context = container["securityContext"]
    assert context["privileged"] is False and context["readOnlyRootFilesystem"] is True
    assert context["capabilities"]["drop"] == ["ALL"]
    assert {*context["capabilities"]["add"]} == needed_capabilities()
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert mounts == {"/var/cache/gpubpf": False, "/var/log/containers": True, "/var/log/pods": True}
    assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def test_kubernetes_takes_the_manifest() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for how in ({}, {"otlp": "http://collector:4317", "runtimeClassName": "nvidia"}):
        daemonset, _ = chart(**how)
        validate.validate(daemonset, validate.latest_version(), strict=True)
    daemonset["spec"]["template"]["spec"]["hostPIDs"] = True
    with pytest.raises(validate.ValidationError):
        validate.validate(daemonset, validate.latest_version(), strict=True)


def test_the_pod_monitor() -> None:
    daemonset, monitor = chart(podMonitor={"enabled": True, "interval": "30s"})
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    assert endpoint["port"] == container["ports"][0]["name"] and endpoint["honorLabels"] is True
    labels = daemonset["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.skipif(shutil.which("helm") is None, reason="no helm")
def test_helm_takes_the_chart() -> None:
    subprocess.run(["helm", "lint", "--strict", CHART], check=True, timeout=200)
    made = subprocess.run(
        ["helm", "template", "gpubpf-exporter", CHART, "--namespace", "gpubpf"],
        check=True, capture_output=True, timeout=200,
    )  # fmt: skip
    assert yaml.safe_load(made.stdout) == yaml.safe_load(MANIFEST.read_text())


def metrics() -> set[str]:
    """The names of all metrics, as Prometheus has them."""
    pytest.importorskip("prometheus_client")
    pytest.importorskip("numpy")
    from gpubpf.exporter.gpus import Gpus
    from gpubpf.exporter.watch import Watch

    families = [*Watch(10, 1.0).latest(), *Gpus(1.0, 10, print).latest()]
    return {family.name + "_total" * (family.kind == "counter") for family in families} | LATER


# A series comes with the first kernel whose overhead is known, or with --otlp.
LATER = {"gpubpf_overhead_ratio", "gpubpf_otlp_pushes_total"}


def test_each_metric_of_the_dashboard_exists() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    known = metrics()
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [one["definition"] for one in dashboard["templating"]["list"] if "definition" in one]
    used = {name for text in expressions for name in re.findall(r"\bgpubpf_\w+", text)}
    assert used <= known, used - known
    assert len(expressions) >= 12 and "gpubpf_kernel_launches_total" in used


def test_prometheus_parses_each_expression(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool (apt-get install prometheus)")
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown = [text.replace("$__rate_interval", "1m") for text in expressions]
    rules = [{"record": f"gpubpf:test{n}", "expr": text} for n, text in enumerate(shown)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", file], check=True, timeout=200)
    subprocess.run(
        ["promtool", "check", "config", DEPLOY / "prometheus/prometheus.yml"], check=True, timeout=200
    )


def test_the_documentation_names_each_metric() -> None:
    text = (ROOT / "docs/exporter.md").read_text()
    rows = {*re.findall(r"^\| `(gpubpf_\w+)` \|", text, re.MULTILINE)}
    assert rows == metrics()


def test_panels_have_a_title_and_a_description_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        assert panel["title"] and panel["description"].endswith(".")
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
