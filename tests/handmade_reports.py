"""Reports made by hand: every kind and every verdict, as the gate would write them."""

import dataclasses
from typing import Any

from draftquant.validate.counting.draft_counts import DraftReplay
from draftquant.validate.judging.advice import Background
from draftquant.validate.judging.judgement import GateReport, judge
from draftquant.validate.judging.policy import resolve_policy
from draftquant.validate.parity.finding import ParityFinding
from draftquant.validate.report.document import (
    Document,
    Judgement,
    document_of,
    document_text,
    parse_report,
)
from draftquant.validate.report.facts import (
    DraftFacts,
    Drafts,
    EngineFacts,
    QuantizationFacts,
    RuleFacts,
)
from draftquant.validate.served.joint_report import joint_report, judge_jointly
from draftquant.validate.served.served_gate import judge_measured, server_noise
from handmade_measurements import losing
from handmade_replays import BASELINE, RELEASE, noisy, replay

EVIL = "</title><script>alert(1)</script>|`*_[x](http://evil.example)@octocat #1\x1b[31m\u202e\n"
QUANTIZED = QuantizationFacts(
    recipe="int4-channel", recipe_sha256="5" * 64, algorithm="absmax", layout="compressed-tensors",
    formats=("weights int4 per channel, activations none",), backend="torch",
    backend_versions={"torch": "2.13.0"}, num_quantized=7, num_kept=8, bytes_before=3_000_000,
    bytes_after=1_800_000, num_calibration_prompts=0, draftquant="0.2.0",
    rules=(RuleFacts(tensors="attention, mlp", action="quantize", why=None),
           RuleFacts(tensors="norm", action="keep", why="a few kilobytes")),
    argv=("draftquant", "quantize", "draft", "--recipe", "int4-channel"),
)  # fmt: skip
DRAFTS = Drafts(
    baseline=DraftFacts(name="bf16", sha256="1" * 64, family="eagle3-llama", num_bytes=3_000_000),
    candidate=DraftFacts(name="int4", sha256="2" * 64, family="eagle3-llama", num_bytes=1_800_000,
                         quantization="int4-channel", quantized=QUANTIZED, hub_id="org/draft",
                         revision="abc"),
)  # fmt: skip
ENGINES = (
    EngineFacts(engine="vllm", version="0.33.0", arch="sm90", verdict="LOADS", evidence="executed",
                error=None, remedy=None, launch="vllm serve TARGET"),
    EngineFacts(engine="vllm", version="0.33.0", arch="sm100", verdict="LOADS", evidence="executed",
                error=None, remedy=None, launch="vllm serve TARGET"),
    EngineFacts(engine="sglang", version="0.5.23", arch="gfx942", verdict="REFUSED",
                evidence="executed", error="ValueError: no kernel", remedy="another recipe",
                launch=None),
)  # fmt: skip
DROPS = {"PASS": (3, 4), "FAIL": (40, 4), "INCONCLUSIVE": (10, 60), "ANOMALOUS": (-90, 4)}
"""Verdict -> how many tokens of 1000 steps the candidate loses, and the noise between prompts."""
KNOWN = Background(
    baseline_sha256="a" * 64, candidate_sha256="b" * 64, head_agreement=0.9995,
    other_target="target (a), not target (b)", seen_continuations=("a0",),
    expected_baseline=2.0, unrelated=True, unrecorded=True, algorithm_to_try="gptq",
    recipes_to_try=("fp8-ptpc",), cut=True, quantized=False, not_compared=("the moon",),
    to_compare=("look up",), warnings=("nothing is what it seems",),
)  # fmt: skip
ONE_BY_ONE = [Background(**{f.name: getattr(KNOWN, f.name)}) for f in dataclasses.fields(KNOWN)]
"""What may be known before drafts are judged, each thing alone; no judge may lose it."""
HASHES = Background(baseline_sha256="1" * 64, candidate_sha256="2" * 64)


def comparison(verdict: str = "PASS", *, categories: str = "a") -> Judgement:
    """A comparison of two replays that gives this verdict."""
    drop, noise = DROPS[verdict]
    policy = resolve_policy("release")
    baseline = replay(BASELINE, name="bf16", categories=categories)
    candidate = replay(noisy(drop, noise), name="int4", categories=categories)
    return judge(baseline, candidate, policy, background=HASHES)


def served(drop: int = 1) -> Any:
    """A comparison of two measurements."""
    return judge_measured(losing(name="a"), losing(drop, name="b"), RELEASE)


def joint() -> Judgement:
    """Served, replayed, the server's noise, and a finding of parity."""
    again = [losing(name=name) for name in ("a", "a2")]
    finding = ParityFinding(
        check="task", what="gsm8k exact_match", estimate=-0.01, lower=-0.02, upper=0.0,
        confidence=0.95, threshold=0.03, verdict="PASS", details=({"plain": 0.8},),
        reason="Fewer are right by at most 2 points.",
    )  # fmt: skip
    found = judge(replay(BASELINE), replay(noisy(3, 4)), RELEASE, background=HASHES)
    return joint_report(
        served=served(), replayed=found, noise=server_noise(*again, RELEASE), parity=(finding,)
    )


def jointly(runs: Any, known: Background, replayed: GateReport | None = None) -> Any:
    """What measurements give, by this tool or another, and a replay beside them."""
    return judge_jointly(
        runs, None, replayed, (), RELEASE, look=None, background=known, warnings=()
    )


def lost(known: Background, report: GateReport) -> list[str]:
    """What was known before, and a report, written and read again, does not say."""
    (_, read), *_ = document(report).comparisons
    missing = []
    for name, value in dataclasses.asdict(known).items():
        if value != getattr(Background(), name):
            told = getattr(read.background, name)
            kept = {*value} <= {*told} if isinstance(value, tuple) else value == told
            missing += [] if kept else [name]
    return missing + [f"warning: {said}" for said in {*known.warnings} - {*read.warnings}]


def mapping_of(judged: Judgement, **changes: Any) -> dict[str, Any]:
    """The report as plain data."""
    drafts, known = DRAFTS, getattr(judged, "background", Background())
    for name in ("baseline", "candidate"):  # by the hashes that are known
        if sha256 := getattr(known, f"{name}_sha256"):
            draft = dataclasses.replace(getattr(drafts, name), sha256=sha256)
            drafts = dataclasses.replace(drafts, **{name: draft})
    parts = {"argv": ("draftquant", "gate", "bf16", "int4"), "drafts": drafts, "engines": ENGINES}
    return document_of(judged, **(parts | changes))  # type: ignore[arg-type]


def text_of(judged: Judgement, **changes: Any) -> str:
    """The report as a file holds it."""
    return document_text(mapping_of(judged, **changes))


def document(judged: Judgement, **changes: Any) -> Document:
    """The report as it is read."""
    return parse_report(text_of(judged, **changes), "report.json")


def evil_document() -> Document:
    """Every text that may come from a file is hostile."""

    def named(draft: DraftReplay) -> DraftReplay:
        prompts = (
            dataclasses.replace(prompt, id=f"{EVIL}{i}", category=("plain", EVIL)[i % 2])
            for i, prompt in enumerate(draft.prompts)
        )
        return dataclasses.replace(draft, name=EVIL, prompts=tuple(prompts))

    baseline, candidate = named(replay(BASELINE)), named(replay(noisy(3, 4)))
    judged = judge(baseline, candidate, RELEASE, background=Background(warnings=(EVIL,)))
    rules = (RuleFacts(tensors=EVIL, action=EVIL, why=EVIL),)
    made = dataclasses.replace(QUANTIZED, recipe=EVIL, formats=(EVIL,), rules=rules, argv=(EVIL,))
    draft = dataclasses.replace(DRAFTS.candidate, name=EVIL, quantized=made, hub_id=EVIL)
    return document(
        judged,
        argv=(EVIL,),
        drafts=Drafts(baseline=dataclasses.replace(draft, quantized=None), candidate=draft),
        engines=(dataclasses.replace(ENGINES[0], error=EVIL, launch=EVIL, version=EVIL),),
    )
