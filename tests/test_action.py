"""The GitHub Action: its script runs with bash, as GitHub's runner does, on a shipped pair."""

import json
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
STAND_IN = f"""#!{sys.executable} -I
import json, os, sys
words = sys.argv[1:]
if words[0] == "-c":
    os.execv(sys.executable, [sys.executable, "-I", *words])
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(words) + "\\n")
verb = words[2]
if verb == "gate":
    (report,) = [word.partition("=")[2] for word in words if word.startswith("--report=")]
    with open(report, "w") as file:
        json.dump({{"verdict": os.environ["VERDICT"]}}, file)
if verb == "card":
    print("# the card")
sys.exit(int(os.environ.get("CODE_OF_" + verb.upper(), "0")))
"""
"""In the place of an interpreter: it writes down what it is asked, and answers as it is told."""
EXIT_CODES = {"PASS": "0", "FAIL": "1", "INCONCLUSIVE": "3", "ANOMALOUS": "3"}

COMMANDS = (
    "##[error]FAKE",
    "##[add-mask]FAIL",
    "::error::FAKE",
    "##[set-output name=verdict;]PASS",
)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of twelve prompts, whose categories are commands of GitHub's runner."""
    folder = tmp_path_factory.mktemp("action")
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:12]
    prompts = [json.loads(line) | {"category": COMMANDS[n % 4]} for n, line in enumerate(lines)]
    text = "".join(f"{json.dumps(each)}\n" for each in prompts)
    (folder / "prompts.jsonl").write_text(text, encoding="utf-8")
    target, draft = str(PAIR / "target"), str(PAIR / "draft")
    record = ["record", "--target", target, "--draft", draft, "--tables"]
    prompts = ["--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "64"]
    assert main([*record, *prompts, "--out", str(folder / "traces")]) == 0
    return folder / "traces"


class Workspace:
    """A folder in which the action runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls_file = folder, folder / "calls"
        self.stand_in = folder / "stand-in"
        self.stand_in.write_text(STAND_IN, encoding="utf-8")
        self.stand_in.chmod(0o755)

    def run(
        self, *, action_path: Path = ROOT, environment: dict[str, str] | None = None, **inputs: str
    ) -> Run:
        """The action on the pair; inputs with underscores for dashes."""
        given = {"draft": str(PAIR / "draft"), "traces": "traces", "python": sys.executable}
        given |= {"install": "false"}
        own = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary.md"),
        }
        return run_action(
            ACTION,
            given | {name.replace("_", "-"): value for name, value in inputs.items()},
            cwd=self.folder,
            github={"action_path": str(action_path)},
            environment=own | (environment or {}),
        )

    def ask(self, verdict: str = "PASS", codes: dict[str, str] | None = None, **inputs: str) -> Run:
        """The action with an interpreter that answers at once; `codes`: what verbs exit with."""
        codes = {"gate": EXIT_CODES[verdict], **(codes or {})}
        environment = {"CALLS": str(self.calls_file), "VERDICT": verdict}
        environment |= {f"CODE_OF_{verb.upper()}": code for verb, code in codes.items()}
        self.calls_file.unlink(missing_ok=True)
        return self.run(environment=environment, **{"python": str(self.stand_in), **inputs})

    @property
    def calls(self) -> list[list[str]]:
        """What it was asked, without `-m` and the module."""
        if not self.calls_file.exists():
            return []
        lines = self.calls_file.read_text(encoding="utf-8").splitlines()
        return [json.loads(line)[2:] for line in lines]

    @property
    def verbs(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, traces: Path) -> tuple[Workspace, Run]:
    """A run of every command but the installation and the card."""
    workspace = Workspace(tmp_path_factory.mktemp("first"))
    (workspace.folder / "##[error]FAKE").symlink_to(PAIR / "draft")
    asked = {"engine": "sglang", "gpu": "mi325x", "fail_on": "fail", "draft": "##[error]FAKE"}
    return workspace, workspace.run(recipe="fp8-ptpc", traces=str(traces), **asked)


def test_it_quantizes_verifies_checks_and_judges(first: tuple[Workspace, Run]) -> None:
    workspace, run = first
    assert run.code == 0, run.log
    assert run.outputs == {
        "verdict": "INCONCLUSIVE",  # twelve prompts decide nothing
        "quantized": "draftquant/quantized",
        "report": "draftquant/gate.json",
        "html": "draftquant/gate.html",
        "markdown": "draftquant/gate.md",
        "junit": "draftquant/gate.xml",
        "card": "",
    }
    for name in ("report", "html", "markdown", "junit"):
        assert (workspace.folder / run.outputs[name]).is_file()
    written = (workspace.folder / "draftquant/gate.md").read_text(encoding="utf-8")
    assert "INCONCLUSIVE" in written
    assert (workspace.folder / "summary.md").read_text(encoding="utf-8").strip() == written.strip()
    assert "LOADS: SGLang" in run.log
    assert all(command in run.log for command in ("##[error]FAKE", *COMMANDS))
    (own,) = run.obeyed  # the annotation, and nothing that a name or a category says
    assert own.startswith("::warning title=draftquant gate%3A INCONCLUSIVE::")


def test_the_commands_come_in_order_and_one_that_fails_is_the_last(workspace: Workspace) -> None:
    run, verbs = workspace.ask(recipe="r.yaml", engine="vllm"), workspace.verbs
    assert run.code == 0, run.log
    assert verbs == ["quantize", "verify", "check", "gate", "report", "card"]
    assert (workspace.folder / run.outputs["card"]).read_text(encoding="utf-8") == "# the card\n"
    for number, verb in enumerate(verbs[:4], start=1):
        run = workspace.ask(recipe="r.yaml", engine="vllm", codes={verb: "2"})
        assert (run.code, run.outputs["verdict"]) == (2, ""), run.log
        assert workspace.verbs == verbs[:number]


VERDICTS = (
    ("PASS", "anything-but-pass", 0), ("FAIL", "fail", 1), ("ANOMALOUS", "fail", 1),
    ("INCONCLUSIVE", "anything-but-pass", 1), ("INCONCLUSIVE", "fail", 0),
)  # fmt: skip


def test_the_verdict_decides_with_or_without_a_card(workspace: Workspace) -> None:
    for verdict, fail_on, code in VERDICTS:
        run = workspace.ask(verdict, quantized="q", fail_on=fail_on)
        assert (run.code, run.outputs["verdict"]) == (code, verdict)  # of a step that fails too
        assert ("card" in workspace.verbs) == (verdict == "PASS")
    run = workspace.ask(quantized="q", codes={"card": "2"})
    assert (run.code, run.outputs["verdict"], run.outputs["card"]) == (0, "PASS", "")
    assert run.obeyed == ["::warning title=draftquant::no model card"]
    assert not list(workspace.folder.rglob("*-card.md"))


OPTIONS = {
    "recipe": {"quantize": "--recipe=r.yaml"}, "calibration": {"quantize": "--traces=c"},
    "backend": {"quantize": "--backend=quark"}, "engine": {"check": "--engine=vllm"},
    "gpu": {"check": "--gpu=h200"}, "ask": {"check": "--ask=v"}, "traces": {"gate": "--traces=t"},
    "policy": {"gate": "--policy=screening"}, "num_draft_tokens": {"gate": "--num-draft-tokens=3"},
    "expect_baseline": {"gate": "--expect-baseline=2.9"},
    "base_model": {"card": "--base-model=a/b"},
    "fail_on": {"gate": "--junit-inconclusive=skipped"}, "license": {"card": "--license=mit"},
    "unrecorded": {"verify": "--foreign", "gate": "--unrecorded"},
    "draft": {"verify": "--against=d", "gate": "d"},
    "name": {"gate": "--report=o/n.json", "card": "--gate=o/n.json"},
    "output": {"gate": "--html=o/n.html"},
}  # fmt: skip
"""Input -> words that it becomes, of these commands."""


def test_each_input_is_an_option_of_its_command(workspace: Workspace) -> None:
    given = {name: next(iter(words.values())).partition("=")[2] for name, words in OPTIONS.items()}
    given |= {"fail_on": "fail", "unrecorded": "true", "name": "n", "output": "o"}
    for inputs, is_there in ((given, True), ({"recipe": "s.yaml", "engine": "sglang"}, False)):
        assert workspace.ask(**inputs).code == 0
        calls = {call[0]: call for call in workspace.calls}
        for name, words in OPTIONS.items():
            for verb, word in words.items():
                assert (word in calls[verb]) is is_there, (name, calls[verb])


REFUSED: tuple[tuple[dict[str, str], str], ...] = (
    ({}, "give recipe or quantized"),
    ({"recipe": "fp8-ptpc", "quantized": "x"}, "give recipe or quantized, not both"),
    ({"recipe": "fp8-ptpc", "name": "../x"}, "name: letters, digits"),
    ({"recipe": "fp8-ptpc", "name": "x\nverdict=PASS"}, "name: letters, digits"),
    ({"recipe": "fp8-ptpc", "output": "x\nverdict=PASS"}, "output, quantized: one line each"),
    ({"quantized": "x\nverdict=PASS"}, "output, quantized: one line each"),
    ({"recipe": "fp8-ptpc", "fail_on": "never"}, "fail-on: anything-but-pass or fail"),
)


@pytest.mark.parametrize(("inputs", "said"), REFUSED)
def test_bad_input_is_refused_first(workspace: Workspace, inputs: Any, said: str) -> None:
    run = workspace.ask(**inputs, install="true")
    assert (run.code, workspace.calls) == (2, [])
    assert [line.partition(said)[0] for line in run.obeyed] == ["::error title=draftquant::"]


ATTACK = "$(touch hit)`touch hit`\"; touch hit; '; touch hit # \\"


def test_no_input_becomes_a_command(workspace: Workspace) -> None:
    names = set(yaml.safe_load(ACTION.read_text(encoding="utf-8"))["inputs"])
    attacked = {name.replace("-", "_") for name in names} - {"python", "install"}
    words = list[str]()
    for kind in ("recipe", "quantized"):
        given = dict.fromkeys(attacked - {"recipe", "quantized"}, ATTACK)
        given |= {"name": "gate", "fail_on": "fail", kind: ATTACK}
        run = workspace.ask(**given)
        assert run.code == 0, run.log
        words += [word for call in workspace.calls for word in call]
    assert {word.partition("=")[0] for word in words if word.endswith(f"={ATTACK}")} == {
        "--recipe", "--traces", "--backend", "--against", "--engine", "--gpu", "--ask", "--policy",
        "--num-draft-tokens", "--expect-baseline", "--base-model", "--license",
    }  # fmt: skip
    for name in ("name", "fail_on"):
        assert workspace.ask(quantized="q", **{name: ATTACK}).code == 2
    assert not list(workspace.folder.rglob("hit"))


SHADOWS = (
    "draftquant/__init__.py", "draftquant/scripts/__init__.py", "draftquant/scripts/cli.py",
    "pip/__init__.py", "pip/__main__.py", "sitecustomize.py", "usercustomize.py",
    "json.py", "statistics.py", "yaml.py", "torch/__init__.py", "rich.py",
)  # fmt: skip


def test_no_file_of_a_checkout_is_run(workspace: Workspace, first: tuple[Workspace, Run]) -> None:
    quantized = str(first[0].folder / "draftquant/quantized")
    for shadow in SHADOWS:
        path = workspace.folder / shadow
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("open('hit', 'w').close()\nraise SystemExit(0)\n", encoding="utf-8")
    none = workspace.folder / "none"  # pip has nothing to install there
    for inputs, code in (
        ({"recipe": "fp8-ptpc", "draft": "none", "install": "true"}, 1),
        ({"recipe": "fp8-ptpc", "draft": "none"}, 2),
        # What is asked for is done all the same, until the gate finds no traces.
        ({"quantized": quantized, "engine": "sglang", "gpu": "mi325x", "traces": "none"}, 2),
    ):
        run = workspace.run(action_path=none, environment={"PYTHONPATH": ".:"}, **inputs)
        assert run.code == code, run.log
        assert not (workspace.folder / "hit").exists(), inputs
    assert "LOADS: SGLang" in run.log


def test_a_search_path_into_the_checkout_is_refused(workspace: Workspace) -> None:
    rest = "/usr/local/bin:/usr/bin:/bin"
    for name, value in (
        ("PATH", f".:{rest}"), ("PATH", f"{rest}:"), ("PATH", f"{rest}:bin:{rest}"),
        ("LD_LIBRARY_PATH", f"{rest}:bin"), ("LD_LIBRARY_PATH", f"{rest}::{rest}"),
    ):  # fmt: skip
        run = workspace.run(recipe="fp8-ptpc", environment={name: value})
        assert run.code == 2
        assert f"{name}: an empty or relative entry is the checkout" in run.log
        assert not (workspace.folder / "draftquant").exists()


def test_no_input_becomes_an_option(workspace: Workspace) -> None:
    run = workspace.run(draft="--help", recipe="--help")
    assert run.code == 2
    assert "usage:" not in run.log
