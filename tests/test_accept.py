"""`accept`: the order of the steps, what a killed run leaves, changed inputs, and the one page."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftquant.api import accept
from draftquant.quantize.engines.contract import EngineCheck, EngineName
from draftquant.quantize.errors import CheckpointError, OutputError
from draftquant.quantize.pairing import EnginePair, PairCheck, PairFinding
from draftquant.quantize.pairing.pair import Level
from draftquant.scripts.api import accept as verb
from draftquant.scripts.api import accept_found, accept_parity, accept_steps
from draftquant.scripts.api.accept_inputs import Given, hash_of
from draftquant.scripts.api.accept_settings import AcceptSettings
from draftquant.scripts.api.accept_step import Step
from draftquant.scripts.api.accept_steps import steps_of
from draftquant.scripts.api.gate import GateSettings
from draftquant.scripts.api.measure import MeasureSettings
from draftquant.scripts.api.parity_draft import DraftParitySettings
from draftquant.scripts.api.record_settings import RecordSettings
from draftquant.scripts.api.settings import SettingsError
from draftquant.scripts.api.verify import Verification, VerifySettings
from draftquant.scripts.cli import main
from draftquant.validate.acceptance.acceptance import Acceptance, Outcome, StepFound, with_parity
from draftquant.validate.acceptance.acceptance_page import page, text
from draftquant.validate.acceptance.journal import Journal
from draftquant.validate.acceptance.step_file import read_step, write_step
from draftquant.validate.errors import GateError
from draftquant.validate.parity.finding import Finding, write_findings
from draftquant.validate.served.joint_report import JointReport
from handmade_reports import EVIL, comparison, document, evil_document, joint, served

FIGURE = Finding(check="draft", what="top-1 agreement", estimate=0.98, threshold=None,
                 verdict="INCONCLUSIVE", reason="No limit was given.")  # fmt: skip
LIMITED = dataclasses.replace(FIGURE, threshold=0.99, verdict="FAIL", reason="It is below.")


def settings(**changes: Any) -> AcceptSettings:
    given: dict[str, Any] = {"draft": "D", "quantized": "Q", "target": "M", "out": "O"}
    return AcceptSettings(**(given | {"prompts": "P"} | changes))


# ---- which steps


SERVERS = {"server": ("http://a", "http://b"), "engine": "vllm"}
STEPS = {
    "check verify record gate parity_draft": {},
    "check verify gate parity_draft": {"traces": "T"},
    "check verify gate": {"measured": ("A", "B")},
    "check verify measure_BF16 measure_QUANT gate": SERVERS,
    "check verify measure_BF16 measure_QUANT measure_plain gate parity_draft parity_texts"
    " tasks_BF16 tasks_QUANT parity_tasks": {
        **SERVERS, "traces": "T", "plain_server": "http://c", "tasks": ("gsm8k",),
        "max_score_drop": 0.01,
    },
}  # fmt: skip


@pytest.mark.parametrize(("names", "given"), STEPS.items())
def test_each_kind_of_evidence_has_its_steps(names: str, given: dict[str, Any]) -> None:
    asked = settings(**given)
    asked.check()
    steps = [step.name.replace(" ", "_") for step in steps_of(Given(asked, Path("O")))]
    assert steps == names.split()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompts": None}, "--prompts: is needed to record"),
        ({"prompts": None, **SERVERS}, "--prompts: is needed to record"),
        ({"server": ("a", "b")}, "--engine: is needed to measure a server"),
        ({"plain_server": "a"}, "--plain-server: is of use for running servers only"),
        ({"served_as": ("a", "b")}, "--served-as: is of use for running servers only"),
        ({"tasks": ("gsm8k",), **SERVERS}, "--tasks: expected --max-score-drop beside it"),
        ({"max_score_drop": 0.1}, "--max-score-drop: expected --tasks beside it"),
    ],
)
def test_settings_that_do_not_go_together(given: dict[str, Any], said: str) -> None:
    with pytest.raises(GateError) as caught:
        settings(**given).check()
    assert str(caught.value).startswith(said)


def test_servers_and_measurements_exclude_each_other() -> None:
    with pytest.raises(SettingsError, match=r"accept\(measured=\): not allowed with server"):
        accept("D", "Q", target="M", out="O", server=("a", "b"), measured=("A", "B"))


def asked(monkeypatch: pytest.MonkeyPatch, output: str, **given: Any) -> Any:
    """What a step asks of its verb."""
    seen: list[Any] = []
    for module in (accept_steps, accept_parity):
        monkeypatch.setattr(module, "carried_out", lambda _verb, own: seen.append(own))
    steps = {step.output: step for step in steps_of(Given(settings(**given), Path("O")))}
    steps[output].run(Path("O") / output)
    return dataclasses.replace(seen[0], listener=RecordSettings(target="", prompts="").listener)


def test_the_steps_ask_their_verbs_for_what_the_whole_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = asked(monkeypatch, "traces", max_new_tokens=7, device="cpu")
    assert recorded == RecordSettings(target=Path("M"), prompts=Path("P"), out=Path("O/traces"),
                                      draft="D", max_new_tokens=7, device="cpu")  # fmt: skip
    how: dict[str, Any] = {"num_draft_tokens": 5, "device": "cpu", "dtype": "bfloat16"}
    judged = asked(monkeypatch, "gate.json", **how, policy="screening", max_relative_drop=0.02,
                   foreign=True, parity=("F",))  # fmt: skip
    assert judged == GateSettings(
        baseline="D", candidate="Q", traces=Path("O/traces"), target=Path("M"), **how,
        parity=("F",), policy="screening", max_relative_drop=0.02, unrecorded=True,
        report=Path("O/gate.json"),
    )  # fmt: skip
    proposed = asked(monkeypatch, "parity-draft.json", **how)
    assert proposed == DraftParitySettings(
        baseline="D", candidate="Q", traces=Path("O/traces"), target=Path("M"), **how,
        report=Path("O/parity-draft.json"),
    )  # fmt: skip


def test_the_steps_ask_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**SERVERS, "plain_server": "http://c", "served_as": ("x", "y"), "max_new_tokens": 9}
    alike = {"engine": "vllm", "prompts": Path("P"), "tokenizer": Path("M"), "max_new_tokens": 9}
    for output, url, own in (
        ("bf16.jsonl", "http://a", {"draft": "D", "served_as": "x"}),
        ("quantized.jsonl", "http://b", {"draft": "Q", "served_as": "y"}),
        ("plain.jsonl", "http://c", {"top_logprobs": 2}),
    ):
        found = asked(monkeypatch, output, **given)
        assert found == MeasureSettings(server=url, out=Path("O") / output, **alike, **own)  # type: ignore[arg-type]
    judged = asked(monkeypatch, "gate.json", **given)
    assert judged == GateSettings(
        baseline="D", candidate="Q", report=Path("O/gate.json"),
        measured=(Path("O/bf16.jsonl"), Path("O/quantized.jsonl")),
    )  # fmt: skip
    texts = asked(monkeypatch, "parity-texts.json", **given)
    assert texts.plain == Path("O/plain.jsonl")
    assert texts.speculative == (Path("O/bf16.jsonl"), Path("O/quantized.jsonl"))
    scored = {**SERVERS, "tasks": ("gsm8k",), "max_score_drop": 0.01}
    for output, url in (("tasks-bf16", "http://a"), ("tasks-quantized", "http://b")):
        tasks = asked(monkeypatch, output, **scored)
        assert (tasks.server, tasks.tasks, tasks.engine) == (url, ("gsm8k",), "vllm")
    scores = asked(monkeypatch, "parity-tasks.json", **scored)
    assert (scores.first, scores.second) == (Path("O/tasks-bf16"), Path("O/tasks-quantized"))
    assert scores.max_score_drop == 0.01


def test_a_foreign_draft_is_verified_as_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []

    def verified(_verb: Any, own: Any) -> Verification:
        seen.append(own)
        return Verification(comparison=None)

    monkeypatch.setattr(accept_steps, "carried_out", verified)
    step = list(steps_of(Given(settings(foreign=True), tmp_path)))[1]
    step.run(tmp_path / step.output)
    (own,) = seen
    want = VerifySettings(output="Q", against="D", foreign=True, target=Path("M"))
    assert dataclasses.replace(own, listener=want.listener) == want
    assert step.found(tmp_path / step.output).outcome == "PASS"


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({}, 1),
        ({"tp": 4}, 4),
        ({"target_args": "--tp 8"}, 8),
        ({"tp": 8, "target_args": "-tp 8"}, 8),
    ],
)
def test_engines_are_asked_at_the_size_that_the_launch_line_says(
    given: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(accept_steps, "verdicts_of", lambda *_, tp, **__: seen.append(tp) or ())
    monkeypatch.setattr(accept_steps, "folder_of", lambda _: tmp_path)
    monkeypatch.setattr(accept_steps.Checkpoint, "open", lambda _: None)
    monkeypatch.setattr(accept_steps, "_pair", lambda _: pair())
    step = next(iter(steps_of(Given(settings(**given), tmp_path))))
    step.run(tmp_path / step.output)
    assert seen == [size]
    monkeypatch.setattr(Given, "quantized_sha256", "q")
    monkeypatch.setattr(Given, "target_sha256", "t")
    assert step.inputs()["--tp"] == size
    assert step.inputs()["draftquant"]


def test_two_sizes_that_differ_are_refused_before_any_work() -> None:
    with pytest.raises(CheckpointError, match="--tp is 1, and --target-args says 8"):
        settings(tp=1, target_args="--tp 8").check()


# ---- what outputs say


def answer(**changes: Any) -> EngineCheck:
    given: dict[str, Any] = {
        "engine": "vllm", "version": "0.33.0", "arch": "sm90", "gpu": "H200 (sm90)", "tp": 1,
        "verdict": "LOADS", "evidence": "",
    }  # fmt: skip
    return EngineCheck(**(given | changes))


def pair(*levels: Level, engine: EngineName | None = "vllm") -> PairCheck:
    """What both engines make of a pair with these findings."""
    found = tuple(PairFinding(level=level, subject="x", text=f"{level} it", remedy="mend it",
                              engine=engine) for level in levels)  # fmt: skip
    engines = tuple(
        EnginePair(
            answer=answer(engine=each),
            findings=tuple(one for one in found if one.engine in (None, each)),
            launch=f"start {each}",
        )
        for each in ("vllm", "sglang")
    )
    return PairCheck(draft="d", target="m", engines=engines, findings=found, tensor_parallel=(1,))


REFUSED = answer(verdict="REFUSED", error="no kernel", remedy="take another recipe")
WRONG = answer(verdict="LOADS BUT WRONG", error="wrong scales", remedy="repair them")
UNKNOWN = answer(verdict="UNKNOWN", error="not executed", remedy="try it", engine="sglang")


@pytest.mark.parametrize(
    ("answers", "beside", "outcome", "said"),
    [
        ([REFUSED, answer()], pair(), "PASS", "loads beside this target in vLLM 0.33.0 on H200"),
        ([answer()], pair("warning", "note"), "PASS", "It loads"),
        ([REFUSED, UNKNOWN], pair(), "INCONCLUSIVE", "SGLang 0.33.0: not executed"),
        ([REFUSED], pair(), "FAIL", "vLLM 0.33.0: no kernel"),
        ([WRONG], pair(), "FAIL", "wrong scales"),
        ([], pair(), "INCONCLUSIVE", "not known what any engine does"),
        ([answer()], pair("refused"), "FAIL", "Draft and target do not fit: refused it."),
        ([answer()], pair("wrong", engine=None), "FAIL", "do not fit: wrong it."),
        ([answer(), answer(engine="sglang")], pair("wrong"), "PASS", "SGLang 0.33.0 on H200"),
        ([answer(), UNKNOWN], pair("refused"), "FAIL", "do not fit: refused it."),
    ],
)
def test_what_engines_say_of_the_draft_and_of_the_pair(
    answers: list[EngineCheck], beside: PairCheck, outcome: str, said: str
) -> None:
    found = accept_found.checked(answers, beside, "check.json")
    assert (found.outcome, said in found.said) == (outcome, True), found.said
    assert (found.action is None) == (outcome == "PASS")
    shown = {one.level: any(one.text in line for line in found.details) for one in beside.findings}
    assert shown == {level: level != "note" for level in shown}
    assert ("vLLM 0.33.0: start vllm" in found.details) == (beside.of("vllm").verdict == "LOADS")


def test_a_wrong_byte_fails() -> None:
    class Report:
        ok, faults = False, tuple(f"t{i} differs" for i in range(9))

    found = accept_found.verified(Report(), "verify.json")  # type: ignore[arg-type]
    assert found.outcome == "FAIL"
    assert found.said.startswith("9 faults: t0")
    assert len(found.details) == 4


def test_a_figure_without_a_limit_is_not_judged(tmp_path: Path) -> None:
    found = {}
    for name, findings in {"none": [FIGURE], "one": [FIGURE, LIMITED]}.items():
        path = tmp_path / f"{name}.json"
        write_findings(path, findings)
        found[name] = accept_found.compared("parity draft", path)
    assert (found["none"].outcome, found["one"].outcome) == ("DONE", "FAIL")
    assert found["one"].said == "top-1 agreement: It is below."


def test_findings_stand_beside_what_the_gate_judged() -> None:
    for judged in (comparison(), served(), joint()):
        before = document(judged)
        assert with_parity(before, ()) == before
        after = with_parity(before, [LIMITED]).judgement
        assert isinstance(after, JointReport)
        assert (after.verdict, after.parity[-1]) == ("FAIL", LIMITED)
        assert (after.served or after.replayed) is not None


# ---- the journal


def test_an_output_is_of_the_inputs_that_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "O"
    journal = Journal(folder)
    with journal.writing():
        assert not journal.is_done("gate.json", {"QUANT": "a"}, hash_of)
        journal.begin("gate.json", {"QUANT": "a", "tasks": ("x",)})
        (folder / "gate.json").write_text("", encoding="utf-8")
    again = Journal(folder)
    assert again.is_done("gate.json", {"QUANT": "a", "tasks": ("x",)}, hash_of)
    with pytest.raises(OutputError, match=r"made of other inputs[\s\S]*QUANT: it was 'a', now"):
        again.is_done("gate.json", {"QUANT": "b", "tasks": ("x",)}, hash_of)


def test_an_output_of_somebody_else_is_not_taken_for_ours(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "O")
    with journal.writing():
        (tmp_path / "O" / "gate.json").write_text("", encoding="utf-8")
        with pytest.raises(OutputError, match=r"gate\.json: is not of this acceptance"):
            journal.is_done("gate.json", {}, hash_of)


@pytest.mark.parametrize("make", [
    lambda folder: (folder.mkdir(), (folder / "config.json").touch()),
    lambda folder: folder.touch(),
    lambda folder: folder.symlink_to(folder.parent),
])  # fmt: skip
def test_a_folder_of_somebody_else_is_not_touched(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    make(tmp_path / "O")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputError, match="nothing of others is touched"):
        Journal(tmp_path / "O")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_was_begun_and_no_more_is_ours(tmp_path: Path) -> None:
    (tmp_path / "O").mkdir()
    (tmp_path / "O" / "accepting.json.77").touch()
    with Journal(tmp_path / "O").writing():
        other = Journal(tmp_path / "O")
        with (
            pytest.raises(OutputError, match="another process is accepting there"),
            other.writing(),
        ):
            pass  # fmt: skip


def test_a_journal_that_is_none_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "O").writing():
        (tmp_path / "O" / "journal.json").write_text("[]", encoding="utf-8")
    with pytest.raises(OutputError, match=r"journal\.json: is no journal of an acceptance"):
        Journal(tmp_path / "O")
    (tmp_path / "check.json").write_text("{}", encoding="utf-8")
    with pytest.raises(GateError, match=r"check\.json: is not what a step of"):
        read_step(tmp_path / "check.json")


# ---- a whole acceptance of steps that are easy


class Easy:
    """Steps that write one word each, and are killed where that is wanted."""

    def __init__(self, **outcomes: Outcome) -> None:
        self.outcomes, self.inputs, self.ran = outcomes, {"QUANT": "a"}, list[str]()
        self.killed_in: str | None = None

    def __call__(self, _given: Given) -> "list[Step]":
        return [self.step(name) for name in self.outcomes]

    def step(self, name: str) -> Step:
        def run(path: Path) -> None:
            self.ran.append(name)
            if name == self.killed_in:
                raise KeyboardInterrupt
            write_step(path, StepFound(name=name, outcome=self.outcomes[name], said=f"{name}!",
                                       action=f"Mend {name}."), {})  # fmt: skip

        return Step(name=name, what=f"all of {name}", output=f"{name}.json", run=run,
                    inputs=lambda: self.inputs, found=read_step, ends=name == "verify")  # fmt: skip


@pytest.fixture
def easy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Easy:
    (tmp_path / "M").mkdir()
    (tmp_path / "M" / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    steps = Easy(check="PASS", verify="PASS", measure="DONE", judge="INCONCLUSIVE")
    monkeypatch.setattr(verb, "steps_of", steps)
    return steps


LINE = ["accept", "D", "Q", "--target", "M", "--prompts", "P", "--out", "O"]


def test_the_steps_in_order_and_the_worst_verdict(
    easy: Easy, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(LINE) == 3
    said = capsys.readouterr()
    assert easy.ran == ["check", "verify", "measure", "judge"]
    assert "step 3 of 4, measure: all of measure" in said.err
    assert "INCONCLUSIVE: judge: judge!" in said.out
    assert "Mend judge." in said.out
    report = json.loads(Path("O/acceptance.json").read_text(encoding="utf-8"))
    assert (report["verdict"], report["exit_code"], report["gate"]) == ("INCONCLUSIVE", 3, None)
    assert [step["outcome"] for step in report["steps"]] == [
        "PASS", "PASS", "DONE", "INCONCLUSIVE", "NOT RUN",
    ]  # fmt: skip
    assert "INCONCLUSIVE" in Path("O/acceptance.html").read_text(encoding="utf-8")


def test_a_killed_run_goes_on(easy: Easy, capsys: pytest.CaptureFixture[str]) -> None:
    easy.killed_in = "measure"
    assert main(LINE) == 130
    assert not Path("O/acceptance.html").exists()
    easy.killed_in = None
    easy.ran.clear()
    assert main(LINE) == 3
    assert easy.ran == ["measure", "judge"]
    assert "step 2 of 4, verify: done before" in capsys.readouterr().err
    easy.ran.clear()
    before = Path("O/acceptance.html").stat().st_mtime_ns
    assert main(LINE) == 3
    assert easy.ran == []
    assert Path("O/acceptance.html").stat().st_mtime_ns == before


def test_a_changed_input_is_refused(easy: Easy, capsys: pytest.CaptureFixture[str]) -> None:
    main(LINE)
    before = Path("O/acceptance.json").read_bytes()
    easy.inputs = {"QUANT": "b"}
    assert main(LINE) == 2
    assert "QUANT: it was 'a', now it is 'b'" in capsys.readouterr().err
    assert Path("O/acceptance.json").read_bytes() == before


@pytest.mark.parametrize("version", [1, 2])
def test_a_result_that_was_edited_is_not_believed(
    version: int, easy: Easy, capsys: pytest.CaptureFixture[str]
) -> None:
    """A journal of version 1 has no hashes: they are added by the run that goes on."""
    main(LINE)
    journal = Path("O/journal.json")
    if version == 1:
        old = json.loads(journal.read_text(encoding="utf-8"))
        old = {**old, "format_version": 1}
        del old["outputs"]
        journal.write_text(json.dumps(old), encoding="utf-8")
        assert main(LINE) == 3
    made, report = Path("O/judge.json"), Path("O/acceptance.html")
    text = made.read_text(encoding="utf-8")
    made.write_text(text.replace("INCONCLUSIVE", "PASS"), encoding="utf-8")
    capsys.readouterr()
    assert main(LINE) == 2
    assert main([*LINE, "--dry-run"]) == 2
    assert "judge.json: was changed after it was made" in capsys.readouterr().err
    made.unlink()  # which the message offers
    page = report.read_bytes()
    report.write_bytes(page.replace(b"INCONCLUSIVE", b"PASS"))
    easy.ran.clear()
    assert main(LINE) == 3
    assert (easy.ran, made.read_text(encoding="utf-8"), report.read_bytes()) == (
        ["judge"],
        text,
        page,
    )


def test_what_was_not_begun_may_have_other_inputs(easy: Easy) -> None:
    easy.killed_in = "check"
    assert main(LINE) == 130
    easy.inputs, easy.killed_in = {"QUANT": "b"}, None
    assert main(LINE) == 3


def test_a_draft_that_does_not_verify_goes_no_further(
    easy: Easy, capsys: pytest.CaptureFixture[str]
) -> None:
    easy.outcomes["verify"] = "FAIL"
    assert main([*LINE, "--json"]) == 1
    assert easy.ran == ["check", "verify"]
    found = json.loads(capsys.readouterr().out)
    assert found["steps"][2]["said"] == "The draft did not get beyond verify."
    assert found["action"] == "Mend verify."


def test_a_dry_run_writes_nothing(easy: Easy, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, "--dry-run"]) == 0
    assert not Path("O").exists()
    assert "To do: all of judge." in capsys.readouterr().out
    easy.killed_in = "measure"
    main(LINE)
    files = {path: path.stat().st_mtime_ns for path in Path("O").rglob("*")}
    capsys.readouterr()
    assert main([*LINE, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "verify!" in said
    assert "To do: all of measure." in said
    assert {path: path.stat().st_mtime_ns for path in Path("O").rglob("*")} == files


@pytest.mark.usefixtures("easy")
def test_a_target_that_is_none_is_refused_before_any_work() -> None:
    with pytest.raises(CheckpointError, match=r"accept\(target=\): D holds no config"):
        accept("D", "Q", target="D", out="O", prompts="P")
    assert not Path("O").exists()


def test_the_card_of_a_draft_that_passed(easy: Easy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb.card, "run", lambda own: f"{own.folder} {own.license}")
    easy.outcomes["judge"] = "PASS"
    found = accept("D", "Q", target="M", out="O", prompts="P", license="mit")
    assert (found.verdict, found.steps[-1].outcome, found.exit_code) == ("PASS", "DONE", 0)
    assert Path("O/card.md").read_text(encoding="utf-8") == "Q mit"
    assert found.reason == "check, verify and judge passed. judge!"
    assert "PASS" in repr(found)


# ---- the page


def acceptance(**changes: Any) -> Acceptance:
    steps = (StepFound(name="gate", outcome="PASS", said="Well.", output="gate.json"),)
    given = {"draft": "bf16", "quantized": "int4", "folder": Path("O"), "steps": steps}
    return Acceptance(**(given | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("judged", [comparison(), joint()], ids=["comparison", "joint"])
def test_the_page_is_that_of_the_gate_under_the_steps(judged: Any) -> None:
    found = acceptance(document=document(judged), figures=(FIGURE,))
    shown, written = page(found), text(found)
    for words in ("1. gate", "top-1 agreement", "Provenance", "accepted in the place of"):
        assert words in shown
    assert shown.count("<h1>") == 1
    assert "| gate | PASS | Well. |" in written
    assert "draftquant gate of" in written
    assert page(acceptance()).count("<h1>") == 1


def test_foreign_text_is_shown_as_text() -> None:
    step = StepFound(name=EVIL, outcome="FAIL", said=EVIL, output=EVIL, details=(EVIL,),
                     action=EVIL)  # fmt: skip
    found = acceptance(draft=EVIL, quantized=EVIL, steps=(step,), document=evil_document())
    assert "<script>" not in page(found)
    assert "<script>" not in text(found)
    assert "[x](http" not in text(found)


def test_hashes_of_files_folders_and_names(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_text("1", encoding="utf-8")
    before = hash_of(tmp_path / "a")
    (tmp_path / "a" / "f").write_text("2", encoding="utf-8")
    assert len({before, hash_of(tmp_path / "a"), hash_of(tmp_path / "a" / "f")}) == 3
    assert hash_of(Path("owner/name")) == "owner/name"
