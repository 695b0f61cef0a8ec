"""The GitHub Action: its steps run with bash, as GitHub's runner does, on a shipped pair."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from action_runner import Run, run_action
from draftquant.scripts.cli import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
ACTION = ROOT / "action.yml"
PAIR = ROOT / "tests/pairs/dflash"
GH = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["GH_CALLS"], "a") as file:
    words = [word.replace("@-", sys.stdin.read()) if "@-" in word else word for word in sys.argv]
    file.write(json.dumps(words[1:]) + "\\n")
if "--jq" in sys.argv:
    print(os.environ.get("GH_COMMENTS", ""))
else:
    sys.exit(int(os.environ.get("GH_CODE_OF_WRITING", "0")))
sys.exit(int(os.environ.get("GH_CODE", "0")))
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of twelve prompts."""
    folder = tmp_path_factory.mktemp("action")
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:12]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    target, draft = str(PAIR / "target"), str(PAIR / "draft")
    record = ["record", "--target", target, "--draft", draft, "--tables"]
    prompts = ["--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "64"]
    assert main([*record, *prompts, "--out", str(folder / "traces")]) == 0
    return folder / "traces"


class Workspace:
    """A folder in which the action runs, with a `gh` that writes down what it is asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls_file = folder / "gh-calls"
        (folder / "bin").mkdir()
        (folder / "bin/gh").write_text(GH, encoding="utf-8")
        (folder / "bin/gh").chmod(0o755)

    def run(
        self,
        *,
        event: str = "pull_request",
        gh: dict[str, str] | None = None,
        only: str | None = None,
        before: dict[str, str] | None = None,
        action_path: Path = ROOT,
        environment: dict[str, str] | None = None,
        **inputs: str,
    ) -> Run:
        """The action on the pair; inputs with underscores for dashes."""
        given = {
            "draft": str(PAIR / "draft"),
            "traces": "traces",
            "python": sys.executable,
            "install": "false",
            **{name.replace("_", "-"): value for name, value in inputs.items()},
        }
        path = f"{self.folder / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        return run_action(
            ACTION,
            given,
            cwd=self.folder,
            github={
                "event_name": event,
                "repository": "owner/drafts",
                "event.pull_request.number": "7",
                "token": "not-a-token",
                "action_path": str(action_path),
            },
            environment={
                "PATH": path,
                "OMP_NUM_THREADS": "1",
                "GITHUB_STEP_SUMMARY": str(self.folder / "summary.md"),
                "GH_CALLS": str(self.calls_file),
                **(gh or {}),
                **(environment or {}),
            },
            only=only,
            before=before or {},
        )

    @property
    def calls(self) -> list[list[str]]:
        """What `gh` was asked."""
        if not self.calls_file.exists():
            return []
        return [
            json.loads(line) for line in self.calls_file.read_text(encoding="utf-8").splitlines()
        ]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, traces: Path) -> tuple[Workspace, Run]:
    """A run of every step but the installation."""
    workspace = Workspace(tmp_path_factory.mktemp("first"))
    asked = {"engine": "sglang", "arch": "mi325x", "fail_on": "fail"}
    return workspace, workspace.run(recipe="fp8-ptpc", traces=str(traces), **asked)


@pytest.fixture
def quantized(first: tuple[Workspace, Run]) -> str:
    return str(first[0].folder / "draftquant/quantized")


@pytest.mark.slow
def test_it_quantizes_verifies_asks_judges_uploads_and_comments(
    first: tuple[Workspace, Run],
) -> None:
    workspace, run = first
    assert run.code == 0, run.log
    assert len(run.steps) == 8
    assert run.outputs["verdict"] == "INCONCLUSIVE"  # twelve prompts decide nothing
    assert run.outputs["quantized"] == "draftquant/quantized"
    reports = [run.outputs[name] for name in ("report", "html", "markdown", "junit")]
    assert reports == [f"draftquant/gate.{kind}" for kind in ("json", "html", "md", "xml")]
    assert run.used["Upload the reports"]["path"].split() == reports
    written = (workspace.folder / "draftquant/gate.md").read_text(encoding="utf-8")
    assert "INCONCLUSIVE" in written
    assert (workspace.folder / "summary.md").read_text(encoding="utf-8").strip() == written.strip()
    assert "LOADS: SGLang" in run.log
    ask, post = workspace.calls
    assert ask[:3] == ["api", "--paginate", "repos/owner/drafts/issues/7/comments"]
    assert post[:4] == ["api", "--method", "POST", "repos/owner/drafts/issues/7/comments"]
    body = post[5].removeprefix("body=")
    assert body.startswith("<!-- draftquant gate: gate -->\n")
    assert written.strip() in body


@pytest.mark.slow
def test_a_quantized_folder_is_judged_as_it_is(
    workspace: Workspace, quantized: str, traces: Path
) -> None:
    given = {"quantized": quantized, "traces": str(traces), "num_draft_tokens": "3"}
    run = workspace.run(event="push", name="k3", **given)
    assert run.code == 1  # twelve prompts decide nothing, and that is no PASS
    assert run.steps[-1] == "Say the verdict"
    assert run.outputs["verdict"] == "INCONCLUSIVE"
    assert run.outputs["quantized"] == quantized
    assert run.outputs["report"] == "draftquant/k3.json"
    assert json.loads((workspace.folder / "draftquant/k3.json").read_text(encoding="utf-8"))
    assert not (workspace.folder / "draftquant/quantized").exists()
    assert workspace.calls == []  # outside of a pull request nothing is commented


COMMENT = "Comment on the pull request"


def commented(workspace: Workspace, text: str = "# PASS\n", **gh: str) -> Run:
    """The step that comments, alone."""
    (workspace.folder / "gate.md").write_text(text, encoding="utf-8")
    return workspace.run(only=COMMENT, before={"steps.gate.outputs.markdown": "gate.md"}, gh=gh)


def test_the_last_comment_of_this_gate_is_replaced(workspace: Workspace) -> None:
    run = commented(workspace, GH_COMMENTS="41\n42")
    assert run.code == 0, run.log
    ask, patch = workspace.calls
    assert 'select(.user.type == "Bot" and (.body | startswith(env.MARK)))' in ask[-1]
    assert patch[:4] == ["api", "--method", "PATCH", "repos/owner/drafts/issues/comments/42"]
    assert patch[5] == "body=<!-- draftquant gate: gate -->\n# PASS\n"


def test_a_long_report_is_cut_to_what_a_comment_may_have(workspace: Workspace) -> None:
    run = commented(workspace, "€" * 70_000)
    assert run.code == 0, run.log
    body = workspace.calls[-1][5]
    assert body.count("€") == 60_000
    assert len(body) < 65_536


def test_without_the_right_to_comment_the_verdict_stays(workspace: Workspace) -> None:
    run = commented(workspace, GH_CODE="1")
    assert run.code == 0, run.log
    assert "::warning title=draftquant::the comments of the pull request cannot be read" in run.log
    run = commented(workspace, GH_COMMENTS="41", GH_CODE_OF_WRITING="1")
    assert run.code == 0, run.log
    assert "::warning title=draftquant::the comment could not be changed" in run.log
    run = commented(workspace, GH_CODE_OF_WRITING="1")
    assert run.code == 0, run.log
    assert "::warning title=draftquant::no comment was made" in run.log


@pytest.mark.parametrize(
    ("inputs", "event"), [({"comment": "false"}, "pull_request"), ({}, "push")]
)
def test_nothing_is_commented_where_nobody_asks(
    workspace: Workspace, inputs: dict[str, str], event: str
) -> None:
    assert workspace.run(only=COMMENT, event=event, **inputs).steps == []


@pytest.mark.parametrize(
    ("verdict", "fail_on", "code"),
    [
        ("PASS", "anything-but-pass", 0),
        ("PASS", "fail", 0),
        ("FAIL", "anything-but-pass", 1),
        ("FAIL", "fail", 1),
        ("INCONCLUSIVE", "anything-but-pass", 1),
        ("INCONCLUSIVE", "fail", 0),
        ("ANOMALOUS", "anything-but-pass", 1),
        ("ANOMALOUS", "fail", 1),
        ("", "fail", 1),
    ],
)
def test_the_verdict_decides(workspace: Workspace, verdict: str, fail_on: str, code: int) -> None:
    before = {"steps.gate.outputs.verdict": verdict}
    run = workspace.run(only="Say the verdict", before=before, fail_on=fail_on)
    assert run.code == code


def test_it_installs_what_lies_beside_it(workspace: Workspace) -> None:
    (workspace.folder / "bin/python").write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8"
    )
    (workspace.folder / "bin/python").chmod(0o755)
    run = workspace.run(only="Install draftquant", install="true", python="python")
    words = run.log.splitlines()
    assert words == [
        "-m", "pip", "install", "--quiet", "--constraint", f"{ROOT}/constraints.txt", str(ROOT),
    ]  # fmt: skip


def test_a_draft_that_is_another_stops_before_the_verdict(
    workspace: Workspace, quantized: str
) -> None:
    other = str(PAIR.parent / "eagle3-llama/draft")
    run = workspace.run(draft=other, quantized=quantized)
    assert run.code in (1, 2)
    assert run.steps[-1] == "Verify every byte"
    assert run.outputs["verdict"] == ""


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({}, "give recipe or quantized"),
        ({"recipe": "fp8-ptpc", "quantized": "x"}, "give recipe or quantized, not both"),
        ({"recipe": "fp8-ptpc", "name": "a b"}, "name: letters, digits"),
        ({"recipe": "fp8-ptpc", "name": "../x"}, "name: letters, digits"),
        ({"recipe": "fp8-ptpc", "name": "x\nverdict=PASS"}, "name: letters, digits"),
        ({"recipe": "fp8-ptpc", "output": "x\nverdict=PASS"}, "output, quantized: one line each"),
        ({"recipe": "fp8-ptpc", "output": ""}, "output, quantized: one line each"),
        ({"quantized": "x\nverdict=PASS"}, "output, quantized: one line each"),
        ({"recipe": "fp8-ptpc", "fail_on": "never"}, "fail-on: anything-but-pass or fail"),
    ],
)
def test_a_bad_input_is_refused_first(
    workspace: Workspace, inputs: dict[str, str], said: str
) -> None:
    run = workspace.run(**inputs)
    assert run.code == 2
    assert run.steps == ["Check the inputs"]
    assert f"::error title=draftquant::{said}" in run.log


ATTACK = "$(touch hit)`touch hit`\"; touch hit; '; touch hit #"


def test_no_input_becomes_a_command(workspace: Workspace, quantized: str) -> None:
    attacked = {
        "Check the inputs": ("name", "output", "quantized", "recipe", "fail_on"),
        "Quantize": ("draft", "recipe", "calibration", "backend", "output"),
        "Verify every byte": ("draft",),
        "Ask the engine": ("engine", "arch"),
        "Judge its acceptance": ("traces", "policy", "num_draft_tokens", "expect_baseline"),
    }
    before = {"steps.quantize.outputs.quantized": quantized}
    for step, names in attacked.items():
        run = workspace.run(only=step, before=before, **dict.fromkeys(names, ATTACK))
        assert (run.code, run.steps) == (2, [step]), run.log
    assert not list(workspace.folder.rglob("hit"))


SHADOWS = (
    "draftquant/__init__.py", "draftquant/scripts/__init__.py", "draftquant/scripts/cli.py",
    "pip/__init__.py", "pip/__main__.py", "sitecustomize.py", "usercustomize.py",
    "json.py", "statistics.py", "yaml.py", "torch/__init__.py", "rich.py",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("search_path", [{}, {"PYTHONPATH": "."}, {"PYTHONPATH": ":/nowhere"}])
def test_no_file_of_the_checkout_becomes_code(
    workspace: Workspace, quantized: str, search_path: dict[str, str]
) -> None:
    for shadow in SHADOWS:
        path = workspace.folder / shadow
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("open('hit', 'w').close()\nraise SystemExit(0)\n", encoding="utf-8")
    before = {
        "steps.quantize.outputs.quantized": str(workspace.folder / "none"),
        "steps.gate.outputs.markdown": "gate.md",
    }
    given = {"draft": "none", "traces": "none", "recipe": "fp8-ptpc", "engine": "sglang"}
    answers = {}
    for step in (each for each in steps() if "PYTHON" in each.get("env", {})):
        name = str(step["name"])
        install = {"install": "true"} if name == "Install draftquant" else {}
        run = workspace.run(
            only=name,
            before=before,
            action_path=workspace.folder / "none",  # pip has nothing to install
            environment=search_path,
            **{**given, **install},
        )
        answers[name] = run.code
        assert not (workspace.folder / "hit").exists(), name
    (workspace.folder / "gate.md").write_text("# PASS\n", encoding="utf-8")
    assert answers == {
        "Install draftquant": 1,
        "Quantize": 2,
        "Verify every byte": 2,
        "Ask the engine": 2,
        "Judge its acceptance": 2,
        COMMENT: 1,
    }
    checked = workspace.run(
        only="Verify every byte",
        before={"steps.quantize.outputs.quantized": quantized},
        environment=search_path,
    )
    assert checked.code == 0, checked.log  # and what is asked for is done all the same


@pytest.mark.parametrize("name", ["PATH", "LD_LIBRARY_PATH"])
@pytest.mark.parametrize("entry", [".", "bin", ""])
@pytest.mark.parametrize("order", ["{entry}:{rest}", "{rest}:{entry}", "{rest}:{entry}:{rest}"])
def test_a_search_path_into_the_checkout_is_refused(
    workspace: Workspace, name: str, entry: str, order: str
) -> None:
    value = order.format(entry=entry, rest="/usr/local/bin:/usr/bin:/bin")
    run = workspace.run(recipe="fp8-ptpc", environment={name: value})
    assert run.code == 2
    assert run.steps == ["Check the inputs"]
    assert f"{name}: an empty or relative entry is the checkout" in run.log


def test_no_input_becomes_an_option(workspace: Workspace) -> None:
    run = workspace.run(draft="--help", recipe="--help")
    assert run.code == 2
    assert "usage:" not in run.log


def steps() -> list[dict[str, Any]]:
    return list(yaml.safe_load(ACTION.read_text(encoding="utf-8"))["runs"]["steps"])


def test_scripts_hold_no_expressions() -> None:
    scripts = [step["run"] for step in steps() if "run" in step]
    assert len(scripts) == 8
    assert not [script for script in scripts if "${{" in script]


def test_every_input_is_described_used_and_in_the_tutorial() -> None:
    action = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    tutorial = (ROOT / "docs/tutorials/ci.md").read_text(encoding="utf-8")
    used = set(re.findall(r"inputs\.([\w-]+)", json.dumps(action["runs"])))
    assert used == set(action["inputs"])
    for kind in ("inputs", "outputs"):
        for name, declared in action[kind].items():
            assert declared["description"], name
            assert f"| `{name}` |" in tutorial, name
