"""Golden rules under a real Prometheus; write RESULTS.md beside this file.

Usage: `experiments/run monitoring --promtool promtool --prometheus prometheus`, where
Debian's package `prometheus` has both.

Exit status 1: a rule is refused, alerts where it must not, or does not where it must.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]

import yaml  # noqa: E402
from draftquant.validate.golden.golden_acceptance import Golden  # noqa: E402
from draftquant.validate.golden.golden_sources import golden_of_replay  # noqa: E402
from draftquant.validate.golden.prometheus import (  # noqa: E402
    Queries,
    limits_of,
    prometheus_rules,
)
from draftquant.validate.measure.measurement import EngineName  # noqa: E402
from draftquant.validate.measure.server_answers import ENGINE_COUNTERS  # noqa: E402
from handmade_replays import replay  # noqa: E402

ENGINES: tuple[EngineName, ...] = ("vllm", "sglang", "tensorrt-llm")
MAX_DROP = 0.01
CATEGORY_LABEL = "category"  # `job` is Prometheus' own
STEPS = 600  # per minute
PORT = 18290
FELL, NOTHING, STOPPED = "DraftAcceptanceFell", "DraftAcceptsNothing", "DraftStopped"
Life = tuple[Mapping[str, float | None], tuple[tuple[str, str], ...]]
"""Acceptance length over golden's by category, "" = all; and alerts that must fire, with theirs."""
LIVES: dict[str, Life] = {
    "as golden": ({"": 1.0}, ()),
    "1 % below golden": ({"": 0.99}, ()),
    "6 % below golden": ({"": 0.94}, ((FELL, ""),)),
    "accepts nothing": ({"": 0.0}, ((FELL, ""), (NOTHING, ""))),
    "does not draft": ({"": None}, ((STOPPED, ""),)),
}
LIVES_BY_CATEGORY: dict[str, Life] = {
    "both categories as golden": ({"a": 1.0, "b": 1.0}, ()),
    "category b 6 % below golden": ({"a": 1.0, "b": 0.94}, ((FELL, "b"),)),
    "category a accepts nothing": ({"a": 0.0, "b": 1.0}, ((FELL, "a"), (NOTHING, "a"))),
    "neither drafts": ({"a": None, "b": None}, ((STOPPED, ""),)),
}
"""What a server does, of whose counters a label tells the category."""


def golden() -> Golden:
    """Of 60 prompts of two categories, K = 3: acceptance length 2.6."""
    histograms = [(60 + i % 7, 30, 30, 80 - i % 7) for i in range(60)]
    found = replay(histograms, name="draft", categories="ab")
    return golden_of_replay(found, draft_sha256="5" * 64)


def queries_of(engine: EngineName, *, by_category: bool) -> Queries:
    """Over the counters of an engine, with or without the label of the category."""
    return Queries.of(engine, None, CATEGORY_LABEL if by_category else None)


def rules_of(engine: EngineName, window: str = "1h", *, by_category: bool = False) -> str:
    """The rules that are tested."""
    limits = limits_of(golden(), MAX_DROP, by_category=by_category)
    return prometheus_rules(golden(), limits, queries_of(engine, by_category=by_category), window)


def increments(engine: EngineName, share: float | None, category: str = "") -> dict[str, float]:
    """Series -> its growth per minute, for a server that accepts so much of golden."""
    own, label = golden().all, 'model_name="target"'
    names = ENGINE_COUNTERS[engine]
    if category:
        label += f',{CATEGORY_LABEL}="{category}"'
    if share is None:
        return {f"{names.generated}{{{label}}}": 5000}
    length = max(1.0, own.mean_acceptance_length * share)
    scale = (length - 1) / (own.mean_acceptance_length - 1)
    accepted = STEPS * (length - 1)
    written = {f"{names.generated}{{{label}}}": STEPS + accepted + 10}
    drafted = ",".join(filter(None, (label, names.verify_matcher)))
    found = {f"{names.verify_steps}{{{drafted}}}": float(STEPS)}
    if names.accepted:
        found[f"{names.accepted}{{{label}}}"] = accepted
    if names.first_tokens:
        found[f"{names.first_tokens}{{{label}}}"] = 10
    for i, rate in enumerate(own.acceptance_rates if names.accepted_at else ()):
        place = f'{names.accepted_at}{{{label},{names.position_label}="{i}"}}'
        found[place] = STEPS * rate * scale
    return written | found


def rule_tests(rules: Path, engine: EngineName, lives: Mapping[str, Life]) -> dict[str, Any]:
    """What `promtool test rules` reads: every life of a server, and its alerts after two hours."""
    tests = []
    for name, (shares, fired) in lives.items():
        series = [
            {"series": one, "values": f"0+{growth:.6g}x180"}
            for category, share in shares.items()
            for one, growth in increments(engine, share, category).items()
        ]
        cases = [
            {
                "eval_time": "2h",
                "alertname": alert,
                "exp_alerts": [
                    _expected(alert, category, rules, shares.get(category))
                    for other, category in fired
                    if other == alert
                ],
            }
            for alert in (FELL, NOTHING, STOPPED)
        ]
        tests.append(
            {"name": name, "interval": "1m", "input_series": series, "alert_rule_test": cases}
        )
    return {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}


def _expected(alert: str, category: str, rules: Path, share: float | None) -> dict[str, Any]:
    length = max(1.0, golden().all.mean_acceptance_length * (share or 0))
    (group,) = yaml.safe_load(rules.read_text(encoding="utf-8"))["groups"]
    own = next(
        rule
        for rule in group["rules"]
        if rule.get("alert") == alert and rule["labels"].get(CATEGORY_LABEL, "") == category
    )
    said = {
        name: text.replace("{{ $labels.model_name }}", "target").replace(
            '{{ $value | printf "%.3f" }}', f"{length:.3f}"
        )
        for name, text in own["annotations"].items()
    }
    labels = {**own["labels"], "model_name": "target"}
    return {"exp_labels": labels, "exp_annotations": said}


def ran(*command: str) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


@contextmanager
def exporter() -> Iterator[int]:
    """A server whose counters grow as golden says, for all engines at once; its port."""
    began = time.monotonic()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            minutes = (time.monotonic() - began) / 60
            lines = [
                f"{name} {growth * minutes:.6f}\n"
                for engine in ENGINES
                for category in "ab"
                for name, growth in increments(engine, 1.0, category).items()
            ]
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(lines).encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()


@contextmanager
def prometheus(program: str, work: Path, rules: Path, port: int) -> Iterator[None]:
    """Prometheus with these rules over that server, until the end of the block."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": "draft", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        ],
    }
    path = work / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    with (work / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [program, f"--config.file={path}", f"--storage.tsdb.path={work / f'data-{rules.stem}'}",
             f"--web.listen-address=127.0.0.1:{PORT}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def asked(path: str, **given: str) -> Any:
    """An answer of Prometheus."""
    url = f"http://127.0.0.1:{PORT}/api/v1/{path}?{urllib.parse.urlencode(given)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["data"]


def provisioned(program: str, work: Path) -> list[str]:
    """Rows of a live Prometheus: rules by health, and recorded acceptance."""
    asked_of = itertools.product(ENGINES, (False, True))
    return [
        _live(program, work, engine, by_category=by_category) for engine, by_category in asked_of
    ]


def _live(program: str, work: Path, engine: EngineName, *, by_category: bool) -> str:
    rules = work / f"live-{engine}-{'categories' if by_category else 'all'}.yml"
    rules.write_text(rules_of(engine, "1m", by_category=by_category), encoding="utf-8")
    with exporter() as port, prometheus(program, work, rules, port):
        time.sleep(25)
        (group,) = asked("rules")["groups"]
        health = {rule["health"] for rule in group["rules"]}
        lengths = asked("query", query="draftquant:acceptance_length")["result"]
        firing = [rule["name"] for rule in group["rules"] if rule.get("alerts")]
    found = [float(one["value"][1]) for one in lengths]
    row = (
        f"| {engine}{', by category' if by_category else ''} | {len(group['rules'])} rules,"
        f" {', '.join(sorted(health))} | {', '.join(f'{one:.4f}' for one in found)} |"
        f" {', '.join(firing) or 'none'} |"
    )
    own = golden().all.mean_acceptance_length
    as_golden = len(found) == 1 + by_category and all(abs(one - own) <= 0.02 for one in found)
    if health != {"ok"} or not as_golden or firing:
        raise SystemExit(row)
    return row


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--promtool", required=True)
    parser.add_argument("--prometheus", required=True)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        for engine in ENGINES:
            for by_category, lives in ((False, LIVES), (True, LIVES_BY_CATEGORY)):
                rules, tests = work / "rules.yml", work / "tests.yml"
                rules.write_text(rules_of(engine, by_category=by_category), encoding="utf-8")
                told = ran(options.promtool, "check", "rules", str(rules))
                tests.write_text(yaml.safe_dump(rule_tests(rules, engine, lives)), encoding="utf-8")
                ran(options.promtool, "test", "rules", str(tests))
                number = re.search(r"(\d+) rules found", told)
                of = ", by category" if by_category else ""
                accepted = number[1] if number else "?"
                rows.append(f"| {engine}{of} | {accepted} | {len(lives)} of {len(lives)} |")
        live = provisioned(options.prometheus, work)
        version = ran(options.prometheus, "--version").split()[2].rstrip(",")
    lives = "".join(
        f"| {name} | {', '.join(f'{one} {of}'.strip() for one, of in fired) or 'none'} |\n"
        for name, (_, fired) in (LIVES | LIVES_BY_CATEGORY).items()
    )
    text = (
        "# Golden acceptance under a real Prometheus\n\nWritten by `experiments/run monitoring`"
        f" with Prometheus {version}. Golden: K = 3, acceptance length"
        f" {golden().all.mean_acceptance_length:.4f}, {MAX_DROP:.0%} tolerated, {STEPS} verify"
        " steps a minute.\n\n"
        "`promtool check rules` and `promtool test rules`, two hours of a server's life:\n\n"
        f"| engine | rules accepted | lives with exactly these alerts |\n|---|---|---|\n"
        f"{chr(10).join(rows)}\n\n| life | alerts |\n|---|---|\n{lives}\n"
        "Provisioned in a running Prometheus that scrapes counters which grow as golden says:\n\n"
        f"| engine | rules | recorded acceptance length | alerts |\n|---|---|---|---|\n"
        f"{chr(10).join(live)}\n"
    )
    (HERE / "RESULTS.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
