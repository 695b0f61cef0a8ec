"""A dashboard for Grafana: a live draft's acceptance, by the engine's counters, beside golden.

It has golden as constants: write it again when another draft is served.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...recipes.packages import table_beside
from ...recipes.regular_file import read_text
from ...recipes.strict_json import parse_object
from ..measure.server_answers import MODEL_LABEL
from .golden_acceptance import Golden
from .prometheus import Limit, Queries, filled, label_is

_TEMPLATE = Path(__file__).with_name("dashboard.json")  # of Grafana 11; later ones migrate it
_WINDOW = "$__rate_interval"
_HEIGHT = 18  # of the panels of one limit
_MODEL = f"{{{{{MODEL_LABEL}}}}}"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def grafana_dashboard(golden: Golden, limits: Sequence[Limit], queries: Queries) -> str:
    """JSON that Grafana imports or provisions, for one limit, or one per value of the label."""
    chosen = Queries(engine=queries.engine, selector=f'{MODEL_LABEL}=~"$model"')
    rows = table_beside(__file__, "panels")
    panels = [
        _panel(row, words, _HEIGHT * i)
        for i, limit in enumerate(limits)
        for words in (_words(limit, chosen, queries.category_label),)
        for row in rows["limit"]
        if row["targets"] != "@positions" or words["positions"]
    ]
    drafted = {"steps": chosen.verify_steps("1m"), "model": _MODEL}
    panels += [_panel(row, drafted, _HEIGHT * len(limits)) for row in rows["last"]]
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    figures = "; ".join(
        f"{limit.golden.mean_acceptance_length:.4f} over {limit.golden.prompts} prompts"
        f"{f' of category {limit.category}' if limit.category else ''}"
        for limit in limits
    )
    counter = f"{chosen.counters.verify_steps}, {MODEL_LABEL}"
    dashboard = parse_object(read_text(_TEMPLATE).replace("COUNTER", counter))
    dashboard |= {
        "title": f"Acceptance of {golden.draft}, K = {golden.num_draft_tokens}",
        "uid": f"draftquant-{(golden.draft_sha256 or golden.prompts_sha256)[:12]}",
        "description": f"Golden acceptance length {figures}, against {golden.target}. Written by"
        f" draftquant {golden.draftquant}.",
        "panels": panels,
    }
    return json.dumps(dashboard, indent=2, allow_nan=False) + "\n"


def _words(limit: Limit, queries: Queries, category_label: str) -> dict[str, Any]:
    """Words for the traffic of one limit: all of it, or one value of the category label."""
    golden, mean = limit.golden, limit.golden.mean_acceptance_length
    accepted = max(mean - 1, 1e-9)
    if category_label:
        only = label_is(category_label, limit.category)
        queries = dataclasses.replace(queries, selector=f"{queries.selector}, {only}")
    rates, position = queries.accepted_at(_WINDOW), f"{{{{{queries.counters.position_label}}}}}"
    steps = [
        {"color": "red", "value": None},
        {"color": "green", "value": round((limit.lowest - 1) / accepted, 6)},
    ]
    return {
        "of": f", {limit.category}" if category_label else "",
        "model": _MODEL,
        "max_drop": f"{limit.max_drop:.1%}",
        "length": queries.acceptance_length(_WINDOW),
        "last_hour": queries.acceptance_length("1h"),
        "mean": f"{mean:.6g}",
        "lowest": f"{limit.lowest:.6g}",
        "accepted": f"{accepted:.6g}",
        "most": len(golden.accepted_at) + 1,
        "thresholds": {"mode": "absolute", "steps": steps},
        "positions": rates
        and [
            (rates, f"{_MODEL}, position {position}"),
            *(
                (f"vector({rate:.6g})", f"golden, position {i}")
                for i, rate in enumerate(golden.acceptance_rates)
            ),
        ],
    }


def _panel(row: Mapping[str, Any], words: Mapping[str, Any], top: int) -> dict[str, Any]:
    panel = filled(row, words)
    x, y, width, height = panel["at"]
    return {
        **{key: panel[key] for key in ("type", "title", "description")},
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": top + y, "w": width, "h": height},
        "targets": [
            {"refId": chr(ord("A") + i % 26) * (1 + i // 26), "datasource": _SOURCE, "expr": expr,
             "legendFormat": legend}
            for i, (expr, legend) in enumerate(panel["targets"])
        ],
        "fieldConfig": {
            "defaults": panel["defaults"],
            "overrides": [_dashed("golden"), _dashed("limit")],
        },
    }  # fmt: skip


def _dashed(prefix: str) -> dict[str, Any]:
    dashes = {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}}
    return {"matcher": {"id": "byRegexp", "options": f"^{prefix}"}, "properties": [dashes]}
