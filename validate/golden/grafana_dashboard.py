"""A dashboard for Grafana: the acceptance of a live draft beside golden.

It asks Prometheus for the engine's counters themselves, and needs no rules. Golden stands in it as
constants: write it again when another draft is served.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...recipes.regular_file import read_text
from ...recipes.strict_json import parse_object
from ..measure.server_answers import MODEL_LABEL
from .golden_acceptance import Golden
from .prometheus import Limit, Queries, label_is

_TEMPLATE = Path(__file__).with_name("dashboard.json")  # of Grafana 11; later ones migrate it
_WINDOW = "$__rate_interval"
_HEIGHT = 18  # of the panels that one limit has
_MODEL = f"{{{{{MODEL_LABEL}}}}}"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
Target = tuple[str, str]
"""A query and its legend."""


def grafana_dashboard(golden: Golden, limits: Sequence[Limit], queries: Queries) -> str:
    """JSON that Grafana imports or provisions.

    `limits`: one, or one for each value of the category label of the queries, whose selector is
    replaced by the dashboard's own.
    """
    chosen = Queries(engine=queries.engine, selector=f'{MODEL_LABEL}=~"$model"')
    panels = [
        panel
        for i, limit in enumerate(limits)
        for panel in _panels(limit, chosen, queries.category_label, _HEIGHT * i)
    ]
    panels.append(_steps(chosen, _HEIGHT * len(limits)))
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    figures = "; ".join(
        f"{one.golden.mean_acceptance_length:.4f} over {one.golden.prompts} prompts"
        f"{f' of category {one.category}' if one.category else ''}"
        for one in limits
    )
    counter = f"{chosen.counters.verify_steps.name}, {MODEL_LABEL}"
    dashboard = parse_object(read_text(_TEMPLATE).replace("COUNTER", counter))
    dashboard |= {
        "title": f"Acceptance of {golden.draft}, K = {golden.num_draft_tokens}",
        "uid": f"draftquant-{(golden.draft_sha256 or golden.prompts_sha256)[:12]}",
        "description": f"Golden acceptance length {figures}, against {golden.target}. Written by"
        f" draftquant {golden.draftquant}.",
        "panels": panels,
    }
    return json.dumps(dashboard, indent=2, allow_nan=False) + "\n"


def _panels(
    limit: Limit, queries: Queries, category_label: str, top: int
) -> Sequence[dict[str, Any]]:
    """Of the traffic that one limit is for, all of it or one value of the category label."""
    golden, mean = limit.golden, limit.golden.mean_acceptance_length
    of = f", {limit.category}" if category_label else ""
    if category_label:
        only = label_is(category_label, limit.category)
        queries = dataclasses.replace(queries, selector=f"{queries.selector}, {only}")
    most = len(golden.accepted_at) + 1
    length = _panel(
        "timeseries",
        f"Mean acceptance length{of}",
        "Tokens per verify step, the target's own included; the limit is the lower end of golden's"
        f" 95% interval less {limit.max_drop:.1%}.",
        (0, top, 16, 9),
        [
            (queries.acceptance_length(_WINDOW), _MODEL),
            (f"vector({mean:.6g})", "golden"),
            (f"vector({limit.lowest:.6g})", "limit"),
        ],
        {"min": 1, "max": most, "decimals": 3},
    )
    now = _panel(
        "stat",
        f"Of golden, last hour{of}",
        "Accepted draft tokens per verify step, over golden's.",
        (16, top, 8, 9),
        [(f"({queries.acceptance_length('1h')} - 1) / {max(mean - 1, 1e-9):.6g}", _MODEL)],
        {"unit": "percentunit", "decimals": 1, "thresholds": _thresholds(limit)},
    )
    rates = queries.accepted_at(_WINDOW)
    if rates is None:
        return length, now
    position = f"{{{{{queries.counters.position_label}}}}}"
    positions = _panel(
        "timeseries",
        f"Accepted at each position{of}",
        "Share of the verify steps that accepted the draft token there; position 0 is the first.",
        (0, top + 9, 24, 9),
        [
            (rates, f"{_MODEL}, position {position}"),
            *(
                (f"vector({rate:.6g})", f"golden, position {i}")
                for i, rate in enumerate(golden.acceptance_rates)
            ),
        ],
        {"min": 0, "max": 1, "unit": "percentunit"},
    )
    return length, now, positions


def _steps(queries: Queries, top: int) -> dict[str, Any]:
    return _panel(
        "timeseries",
        "Verify steps in a minute",
        "None, while text is written, means that the server does not draft.",
        (0, top, 24, 7),
        [(queries.verify_steps("1m"), _MODEL)],
        {"min": 0},
    )


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


def _thresholds(limit: Limit) -> dict[str, Any]:
    share = (limit.lowest - 1) / max(limit.golden.mean_acceptance_length - 1, 1e-9)
    steps = [{"color": "red", "value": None}, {"color": "green", "value": round(share, 6)}]
    return {"mode": "absolute", "steps": steps}
