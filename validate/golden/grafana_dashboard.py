"""A dashboard for Grafana: the acceptance of a live draft beside golden.

It asks Prometheus for the engine's counters themselves, so that it needs no rules. Golden stands in
it as constants: write it again when another draft is served.
"""

import json
from collections.abc import Sequence
from typing import Any

from .golden import Golden, GoldenCategory
from .prometheus_rules import Alarm
from .promql import Queries

_SCHEMA = 39
"""Of dashboards: Grafana 11; later ones migrate it by themselves."""
_WINDOW = "$__rate_interval"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
Target = tuple[str, str]
"""A query and its legend."""


def grafana_dashboard(golden: Golden, category: str, queries: Queries, alarm: Alarm) -> str:
    """JSON that Grafana imports or provisions.

    Args:
        golden: of the draft that is served.
        category: of golden whose prompts are like the traffic; "" = all.
        queries: of the engine that serves it; its selector is replaced by the dashboard's own.
        alarm: whose limit is drawn.
    """
    own = golden.categories[category]
    label = queries.counters.model_label
    chosen = Queries(engine=queries.engine, selector=f'{label}=~"$model"')
    panels = list(_panels(own, chosen, alarm))
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    dashboard = {
        "title": f"Acceptance of {golden.draft}, K = {golden.num_draft_tokens}",
        "uid": f"draftquant-{(golden.draft_sha256 or golden.prompts_sha256)[:12]}",
        "description": f"Golden acceptance length {own.mean_acceptance_length:.4f} over"
        f" {own.prompts} prompts{f' of category {category}' if category else ''}, against"
        f" {golden.target}. Written by draftquant {golden.draftquant}.",
        "tags": ["draftquant", "speculative decoding"],
        "schemaVersion": _SCHEMA,
        "version": 1,
        "editable": True,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": _variables(chosen)},
        "panels": panels,
    }
    return json.dumps(dashboard, indent=2, allow_nan=False) + "\n"


def _panels(golden: GoldenCategory, queries: Queries, alarm: Alarm) -> Sequence[dict[str, Any]]:
    mean, limit = golden.mean_acceptance_length, alarm.limit(golden)
    model = f"{{{{{queries.counters.model_label}}}}}"
    most = len(golden.accepted_at) + 1
    length = _panel(
        "timeseries",
        "Mean acceptance length",
        "Tokens per verify step, the target's own included; the limit is golden less"
        f" {alarm.max_drop:.1%}.",
        (0, 0, 16, 9),
        [
            (queries.acceptance_length(_WINDOW), model),
            (f"vector({mean:.6g})", "golden"),
            (f"vector({limit:.6g})", "limit"),
        ],
        {"min": 1, "max": most, "decimals": 3},
    )
    now = _panel(
        "stat",
        "Of golden, last hour",
        "Accepted draft tokens per verify step, over golden's.",
        (16, 0, 8, 9),
        [(f"({queries.acceptance_length('1h')} - 1) / {max(mean - 1, 1e-9):.6g}", model)],
        {"unit": "percentunit", "decimals": 1, "thresholds": _thresholds(golden, alarm)},
    )
    steps = _panel(
        "timeseries",
        "Verify steps in a minute",
        "None, while text is written, means that the server does not draft.",
        (0, 18, 24, 7),
        [(queries.verify_steps("1m"), model)],
        {"min": 0},
    )
    rates = queries.accepted_at(_WINDOW)
    if rates is None:
        return length, now, steps
    position = f"{{{{{queries.counters.position_label}}}}}"
    positions = _panel(
        "timeseries",
        "Accepted at each position",
        "Share of the verify steps that accepted the draft token there; position 0 is the first.",
        (0, 9, 24, 9),
        [
            (rates, f"{model}, position {position}"),
            *(
                (f"vector({rate:.6g})", f"golden, position {i}")
                for i, rate in enumerate(golden.acceptance_rates)
            ),
        ],
        {"min": 0, "max": 1, "unit": "percentunit"},
    )
    return length, now, positions, steps


def _panel(
    kind: str,
    title: str,
    description: str,
    place: tuple[int, int, int, int],
    targets: Sequence[Target],
    defaults: dict[str, Any],
) -> dict[str, Any]:
    x, y, width, height = place
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": height},
        "targets": [
            {"refId": chr(ord("A") + i % 26) * (1 + i // 26), "datasource": _SOURCE, "expr": expr,
             "legendFormat": legend}
            for i, (expr, legend) in enumerate(targets)
        ],
        "fieldConfig": {
            "defaults": defaults,
            "overrides": [_dashed("golden"), _dashed("limit")],
        },
    }  # fmt: skip


def _dashed(prefix: str) -> dict[str, Any]:
    """What is constant is drawn with dashes."""
    return {
        "matcher": {"id": "byRegexp", "options": f"^{prefix}"},
        "properties": [
            {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}},
        ],
    }


def _thresholds(golden: GoldenCategory, alarm: Alarm) -> dict[str, Any]:
    mean = golden.mean_acceptance_length
    share = (alarm.limit(golden) - 1) / max(mean - 1, 1e-9)
    steps = [{"color": "red", "value": None}, {"color": "green", "value": round(share, 6)}]
    return {"mode": "absolute", "steps": steps}


def _variables(queries: Queries) -> list[dict[str, Any]]:
    found, label = queries.counters.verify_steps.name, queries.counters.model_label
    query = f"label_values({found}, {label})"
    return [
        {"name": "datasource", "type": "datasource", "label": "Prometheus", "query": "prometheus"},
        {
            "name": "model",
            "type": "query",
            "label": "Target",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": "model"},
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "refresh": 2,
        },
    ]
