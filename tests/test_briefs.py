"""Reports as a REPL and a notebook show them: short, and with the page where there is one."""

import html
import pickle
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import corpus
import pytest
from draftquant import api as dq
from draftquant.quantize.files.hub import command_line
from draftquant.recipes.brief import Brief, megabytes, percent
from draftquant.scripts.cli import main
from draftquant.scripts.frame import reports

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("briefs")
    (folder / "traces").symlink_to(corpus.traces("eagle3-llama"))
    made = corpus.quantized("eagle3-llama", "fp8-ptpc", pair=True)
    shutil.copytree(made, folder / "out")  # whose name is that of the draft
    return folder


@pytest.fixture(scope="module")
def gate(work: Path) -> Any:
    return dq.gate(PAIR / "draft", work / "out", work / "traces", policy="screening")


def test_every_report_is_brief() -> None:
    for kind in (getattr(dq, name) for name in (*reports.__all__, "Recipe")):
        assert kind.__repr__ is Brief.__repr__
        assert "brief" in {key for each in kind.__mro__[:-2] for key in vars(each)}


class Long(Brief):
    """Holds what anybody may have written."""

    def brief(self) -> dict[str, object]:
        long = {f"label {i}": "x" * 500 for i in range(20)}
        return {"verdict": "PASS <b>\x1b", "path": Path("/a" * 99), "nothing": None, **long}


def test_no_repr_is_long_and_nothing_in_it_is_markup() -> None:
    shown, table = repr(Long()), Long()._repr_html_()
    assert len(shown) <= 300
    assert len(shown.splitlines()) <= 3
    assert shown.startswith("<Long PASS <b>\\x1b; path …")
    assert "nothing" not in shown
    assert "PASS &lt;b&gt;\\x1b" in table
    assert "<script" not in table
    assert "http" not in table


def test_what_reports_say(work: Path, gate: Any) -> None:
    draft, out, traces = PAIR / "draft", work / "out", work / "traces"
    info = dq.traces_info(traces)
    found: tuple[tuple[str, object], ...] = (
        ("eagle3-llama; folder ", dq.inspect(draft)),
        ("fp8-ptpc; draft ", dq.plan(draft, "fp8-ptpc")),
        ("verified; out ", dq.quantize(draft, "int4-channel", work / "int4")),
        ("verified, every byte; folder ", dq.verify(out, draft)),
        ("", dq.dequantize(out, work / "plain")),
        ("LOADS; engine vLLM ", dq.check(out, "vllm", gpu="h200")),
        ("LOADS; vLLM ", dq.check(out)),
        ("acceptance length ", dq.replay(draft, traces)[0]),
        ("2 recipes on 6 GPUs; K 3", dq.estimate(draft, recipes=["fp8-ptpc", "int4-channel"])),
        ("fp8-ptpc; summary ", dq.recipes_show("fp8-ptpc")),
        ("0 removed, 0.0 MB", dq.clean(work)),
        ("", info),
        ("", info.traces),
        (f"{gate.verdict}; acceptance length ", gate),
    )
    for start, report in found:
        shown = " ".join(repr(report).split())
        assert shown.startswith(f"<{type(report).__name__} {start}"), shown
        assert len(shown) <= 300
        assert "object at" not in shown
    assert f"change {percent(gate.relative_change)}; bounds " in " ".join(repr(gate).split())
    before, after = (float(one.split()[-1]) for one in repr(found[1][1]).split(" MB")[:2])
    assert before > after
    assert "; prompts 12; tokens " in " ".join(repr(info.traces).split())
    assert (megabytes(300_000), megabytes(12_345_678)) == ("0.3 MB", "12 MB")
    assert (megabytes(3.24e9), percent(None)) == ("3.2 GB", None)


class Checked(HTMLParser):
    """Tags of a page, and what a frame holds."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.framed = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.framed += dict(attrs).get("srcdoc") or ""


def test_a_notebook_shows_the_page_of_the_gate_in_a_frame(gate: Any) -> None:
    frame = Checked(gate._repr_html_())
    assert frame.tags == ["iframe"]
    assert frame.framed == gate.html()
    assert "script" not in Checked(frame.framed).tags
    assert html.escape(gate.verdict) in frame.framed


def same_bytes(work: Path, words: list[str], kinds: dict[str, str], call: Any) -> Any:
    """What a call gives, whose texts are the files that the command writes."""
    for kind, name in kinds.items():
        words = [*words, f"--{kind}", str(work / name)]
    assert main(words) in (0, 1, 3)
    with command_line(("draftquant", *words)):
        called = call()
    for kind, name in kinds.items():
        text = getattr(called, {"report": "json"}.get(kind, kind))()
        assert (work / name).read_text(encoding="utf-8") == text
    return called


def test_a_judgement_gives_the_commands_bytes(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    drafts, traces = [str(PAIR / "draft"), str(work / "out")], str(work / "traces")
    words = ["gate", *drafts, "--traces", traces, "--policy", "screening"]
    kinds = {"report": "g.json", "html": "g.html", "markdown": "g.md", "junit": "g.xml"}
    called = same_bytes(work, words, kinds, lambda: dq.gate(*drafts, traces, policy="screening"))
    read = dq.report(work / "g.json")
    assert (read.json(), read.html(), read.markdown()) == (
        called.json(), called.html(), called.markdown(),
    )  # fmt: skip
    assert repr(read).startswith(f"<WrittenReport {called.verdict}; draft out; against draft; r")
    paths = called.write(html=work / "w.html", junit=work / "w.xml", json=work / "w.json")
    assert [path.name for path in paths] == ["w.html", "w.xml", "w.json"]
    for path in paths:
        assert path.read_bytes() == path.with_stem("g").read_bytes()
    with pytest.raises(dq.DraftQuantError, match="already exists"):
        called.write(html=work / "w.html", markdown=work / "w.md")
    assert not (work / "w.md").exists()
    with pytest.raises(dq.DraftQuantError, match=r"w\.txt: --html: expected a name ending in"):
        called.write(html=work / "w.txt")
    called.write(html=work / "w.html", overwrite=True)
    again = pickle.loads(pickle.dumps(called))  # noqa: S301 (our own)
    assert (again, again.html()) == (called, called.html())
    with pytest.raises(KeyError):
        again.with_texts({}).html()
    bare = type(called)(**{name: getattr(called, name) for name in called.__dataclass_fields__})
    with pytest.raises(dq.DraftQuantError, match="has no files of its own"):
        bare.html()
    assert "<table" in bare._repr_html_()


def test_a_comparison_gives_the_commands_bytes(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    drafts, traces = [str(PAIR / "draft"), str(work / "out")], str(work / "traces")
    kinds = {"html": "c.html", "plot": "c.svg", "report": "c.json"}
    words = ["compare", *drafts, "--traces", traces]
    called = same_bytes(work, words, kinds, lambda: dq.compare(drafts, traces))
    assert called.argv == ("draftquant", "compare", "draft", "out", "--traces", "traces")
    assert "2026-09-21 at 14:13 UTC" in called.html()
    assert "draftquant compare draft out --traces traces" in called.html()
    assert called.write(plot=work / "d.svg") == (work / "d.svg",)
    assert (work / "d.svg").read_bytes() == (work / "c.svg").read_bytes()
    assert Checked(called._repr_html_()).tags == ["iframe"]
