"""The dashboard asks for metrics that there are, by labels they have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gateway.metrics import GatewayMetrics

DASHBOARD = Path(__file__).parents[3] / "deployments" / "grafana" / "dashboard.json"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def panels() -> list[dict[str, Any]]:
    return [p for p in json.loads(DASHBOARD.read_text())["panels"] if p["type"] != "row"]


def series() -> dict[str, set[str]]:
    """Name as Prometheus has it → its labels."""
    found = {}
    for collector in GatewayMetrics(["m"]).registry._collector_to_names:
        for family in collector.describe():
            labels = set(getattr(collector, "_labelnames", ()))
            extra = {"le"} if family.type == "histogram" else set()
            for suffix in SUFFIXES[family.type]:
                found[family.name + suffix] = labels | extra
    return found


def test_every_panel_asks_for_metrics_and_labels_that_there_are() -> None:
    known, asked = series(), set()
    for panel in panels():
        for target in panel["targets"]:
            names = re.findall(r"repertory_\w+", target["expr"])
            assert names, panel["title"]
            assert set(names) <= set(known), panel["title"]
            labels = set.intersection(*(known[name] for name in names))
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            grouped = {
                g.strip() for by in re.findall(r"by \(([^)]*)\)", target["expr"]) for g in by.split(",")
            }
            assert shown | grouped <= labels, panel["title"]
            asked |= set(names)
    assert len(asked) >= 18


def test_panels_stand_beside_and_below_one_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
