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
        assert issubclass(kind, Brief)
        assert kind.__repr__ is Brief.__repr__
        assert "brief" in {key for each in kind.__mro__[:-2] for key in vars(each)}


class Long(Brief):
    """Holds what anybody may have written."""

    def brief(self) -> dict[str, object]:
        long = {f"label {i}": "x" * 500 for i in range(20)}
        return {"verdict": "PASS <b>\x1b", "path": Path("/a" * 99), "nothing": None, **long}


def test_no_repr_is_long_and_nothing_in_it_is_markup() -> None:
    shown = repr(Long())
    assert len(shown) <= 300
    assert len(shown.splitlines()) <= 3
    assert shown.startswith("<Long PASS <b>\\x1b; path …")
    assert "nothing" not in shown
    table = Long()._repr_html_()
    assert "PASS &lt;b&gt;\\x1b" in table
    assert "<script" not in table
    assert "http" not in table


def test_what_reports_say(work: Path, gate: Any) -> None:
    draft, out, traces = PAIR / "draft", work / "out", work / "traces"
    found: dict[str, object] = {
        "eagle3-llama; folder ": dq.inspect(draft),
        "fp8-ptpc; draft ": dq.plan(draft, "fp8-ptpc"),
        "verified, every byte; folder ": dq.verify(out, draft),
        "LOADS; engine vLLM ": dq.check(out, "vllm", gpu="h200"),
        "acceptance length ": dq.replay(draft, traces)[0],
        "2 recipes on 6 GPUs; K 3": dq.estimate(draft, recipes=["fp8-ptpc", "int4-channel"]),
        "1 recipe on 1 GPU; K 3": dq.estimate(draft, recipes=["fp8-ptpc"], gpus=["h200"]),
        "fp8-ptpc; summary ": dq.recipes_show("fp8-ptpc"),
        "0 removed, 0.0 MB": dq.clean(work),
        f"{gate.verdict}; acceptance length ": gate,
    }
    for start, report in found.items():
        shown = repr(report)
        assert shown.startswith(f"<{type(report).__name__} {start}".replace("\n", " ")), shown
        assert len(shown) <= 300
        assert "object at" not in shown
    assert f"change {percent(gate.relative_change)}; bounds " in " ".join(repr(gate).split())
    info = dq.traces_info(traces)
    assert "; prompts 12; " in " ".join(repr(info).split())
    assert "; prompts 12; tokens " in " ".join(repr(info.traces).split())
    written = dq.quantize(draft, "int4-channel", work / "int4")
    assert repr(written).startswith("<QuantizeReport verified; out ")
    plain = dq.dequantize(work / "int4", work / "plain")
    assert "; dtype " in repr(plain)
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
    inside = Checked(frame.framed)
    assert "script" not in inside.tags
    assert "prefers-color-scheme: dark" in frame.framed
    assert html.escape(gate.verdict) in frame.framed


def test_methods_of_a_judgement_give_the_bytes_of_the_command(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    asked = {"report": "g.json", "html": "g.html", "markdown": "g.md", "junit": "g.xml"}
    words = [
        "gate", str(PAIR / "draft"), str(work / "out"), "--traces", str(work / "traces"),
        "--policy", "screening",
    ]  # fmt: skip
    for kind, name in asked.items():
        words += [f"--{kind}", str(work / name)]
    exit_code = main(words)
    capsys.readouterr()
    with command_line(("draftquant", *words)):
        called = dq.gate(PAIR / "draft", work / "out", work / "traces", policy="screening")
    assert isinstance(called, dq.GateReport)
    assert called.exit_code == exit_code
    texts = (called.json(), called.html(), called.markdown(), called.junit())
    for name, text in zip(asked.values(), texts, strict=True):
        assert (work / name).read_text(encoding="utf-8") == text
    read = dq.report(work / "g.json")
    assert (read.json(), read.html(), read.markdown()) == texts[:3]
    assert repr(read).startswith(
        f"<WrittenReport {called.verdict}; draft out; against draft; reason "
    )
    paths = called.write(html=work / "w.html", junit=work / "w.xml", json=work / "w.json")
    assert [path.name for path in paths] == ["w.html", "w.xml", "w.json"]
    assert (work / "w.html").read_bytes() == (work / "g.html").read_bytes()
    assert (work / "w.json").read_bytes() == (work / "g.json").read_bytes()
    with pytest.raises(dq.DraftQuantError, match="already exists"):
        called.write(html=work / "w.html", markdown=work / "w.md")
    assert not (work / "w.md").exists()
    with pytest.raises(dq.DraftQuantError, match=r"w\.txt: html=: expected a name ending in"):
        called.write(html=work / "w.txt")
    called.write(html=work / "w.html", overwrite=True)
    again = pickle.loads(pickle.dumps(called))  # noqa: S301 (our own)
    assert again == called
    assert again.html() == called.html()


def test_a_part_of_a_report_has_no_files_of_its_own(gate: Any) -> None:
    part = pickle.loads(pickle.dumps(gate)).with_texts({})  # noqa: S301 (our own)
    with pytest.raises(KeyError):
        part.html()
    bare = type(gate)(**{name: getattr(gate, name) for name in gate.__dataclass_fields__})
    with pytest.raises(dq.DraftQuantError, match="has no files of its own"):
        bare.html()
    assert "<table" in bare._repr_html_()


def test_methods_of_a_comparison_give_the_bytes_of_the_command(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    drafts = [str(PAIR / "draft"), str(work / "out")]
    words = ["compare", *drafts, "--traces", str(work / "traces")]
    names = {"html": "c.html", "plot": "c.svg", "report": "c.json"}
    for kind, name in names.items():
        words += [f"--{kind}", str(work / name)]
    assert main(words) == 0
    capsys.readouterr()
    with command_line(("draftquant", *words)):
        called = dq.compare(drafts, work / "traces")
    assert called.date == "2026-09-21T14:13:20Z"
    assert called.argv == ("draftquant", "compare", "draft", "out", "--traces", "traces")
    assert "2026-09-21 at 14:13 UTC" in called.html()
    assert "draftquant compare draft out --traces traces" in called.html()
    for name, text in zip(
        names.values(), (called.html(), called.plot(), called.json()), strict=True
    ):
        assert (work / name).read_text(encoding="utf-8") == text
    assert called.write(plot=work / "d.svg") == (work / "d.svg",)
    assert (work / "d.svg").read_bytes() == (work / "c.svg").read_bytes()
    assert Checked(called._repr_html_()).tags == ["iframe"]
