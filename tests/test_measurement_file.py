"""Measurement files: what is written is read, and what cannot be is refused with its line."""

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import corpus
import pytest
from draftquant.recipes.errors import MeasureError
from draftquant.scripts.cli import main
from draftquant.validate.measure import measurement_file
from draftquant.validate.measure.measurement import (
    Asked,
    Measurement,
    RequestRecord,
    ServerIdentity,
    Setup,
    Speculation,
    prompts_sha256,
    tokens_per_second,
)
from draftquant.validate.measure.measurement_file import line_of, read_measurement
from draftquant.validate.measure.measuring import DraftIdentity, identified
from draftquant.validate.runs.report_pages import draft_identity
from handmade_measurements import written
from test_prompts import target  # noqa: F401 - a fixture
from vllm_server import VLLMServer

RECORDS = tuple(
    RequestRecord(
        id=f"p{i}",
        category="code",
        prompt_sha256=f"{i:064x}",
        num_prompt_tokens=4,
        token_ids=(7, 8, 9),
        ended="length",
        histogram=(1, 0, 1),
        accepted=(2, 0),
        drafted=(2, 1),
        token_logprob=(-0.5, -0.25, 0.0),
        top_gap=(0.0, 1.0, 2.5),
        began=0.5 * i,
        time_to_first_token=0.1,
        latency=0.3,
    )
    for i in range(3)
)
DIGEST = prompts_sha256((r.id, r.category, r.prompt_sha256) for r in RECORDS)
NESTED = {"a": {"b": [1, None, "x"]}}
SETUP = Setup(
    server=ServerIdentity(engine="vllm", version="0.32.0", model="m", arguments=NESTED),
    speculation=Speculation(num_draft_tokens=2, lossy=("x = 1",)),
    asked=Asked(prompts_sha256=DIGEST, max_new_tokens=3, concurrency=2, num_top_logprobs=2),
    draftquant="0.1.0",
)


def write(folder: Path, setup: Setup = SETUP, records: tuple[RequestRecord, ...] = RECORDS) -> Path:
    return written(folder / "r", Measurement(name="r", setup=setup, records=records))


def edited(folder: Path, line: int, key: str, value: object) -> Path:
    """With another value, or without the key for `...`, in a line from 1."""
    path = write(folder)
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    at = lines[line - 1]
    *outer, last = key.split(".")
    for name in outer:
        at = at[name]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    path.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """With speculation and log-probabilities, and without."""
    whole = Measurement(name="r", setup=SETUP, records=RECORDS)
    assert read_measurement(write(tmp_path)) == whole
    assert tokens_per_second(whole) == pytest.approx(9 / 1.3)
    none: dict[str, Any] = dict.fromkeys(
        ("histogram", "accepted", "drafted", "token_logprob", "top_gap", "time_to_first_token")
    )
    records = tuple(replace(record, **none) for record in RECORDS)
    setup = replace(SETUP, speculation=None, asked=replace(SETUP.asked, num_top_logprobs=0))
    found = read_measurement(write(tmp_path, setup, records))
    assert (found.setup, found.records, found.records[0].counts) == (setup, records, None)
    assert line_of(replace(RECORDS[0], id="\u00e9\u2028")).isascii()


BAD: dict[int, tuple[tuple[str, object], ...]] = {
    1: (
        ("format", "x"), ("format", ...), ("server.version", ""), ("server.model", "a\x1b"),
        ("speculation.num_draft_tokens", 0), ("speculation.draft_sha256", "x"),
        ("asked.temperature", float("nan")),
    ),
    2: (
        ("id", "a\nb"), ("category", ""), ("token_ids", [7, 8]), ("token_ids", [7] * 4),
        ("token_ids", [7, 8, 2**31]), ("token_ids", [True]), ("histogram", None),
        ("histogram", [1, 1]), ("histogram", [2, -1, 1]), ("histogram", [1, 1, 1]),
        ("accepted", [2, 1]), ("accepted", [2, 0, 3]), ("accepted", None), ("drafted", [2]),
        ("token_logprob", None), ("token_logprob", [0, 0, 0.5]), ("top_gap", [0.0]),
        ("top_gap", [0, 0, -0.5]), ("latency", float("inf")), ("drafted", [1, 1]),
        ("drafted", [3, 1]), ("time_to_first_token", 0.4),
    ),
}  # fmt: skip
"""Line -> a key of it with a value that cannot be; what is said is kept in told/."""


@pytest.mark.parametrize("line", BAD)
def test_what_cannot_be_is_refused_with_its_line(tmp_path: Path, line: int) -> None:
    for key, value in BAD[line]:
        path = edited(tmp_path, line, key, value)
        with pytest.raises(MeasureError) as found:
            read_measurement(path)
        assert found.value.where == f"{path}:{line}", (key, value)


def test_what_was_not_asked_for_is_refused(tmp_path: Path) -> None:
    for key, value in (("asked.num_top_logprobs", 0), ("speculation", None)):
        with pytest.raises(MeasureError, match="expected none, because"):
            read_measurement(edited(tmp_path, 1, key, value))
    stopped = tuple(replace(record, ended="stop") for record in RECORDS)
    path = write(tmp_path, replace(SETUP, asked=replace(SETUP.asked, ignore_eos=True)), stopped)
    with pytest.raises(MeasureError, match="asked for 3 tokens whatever they are, got 3 and 'st"):
        read_measurement(path)


def test_files_that_are_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for change in (
        lambda lines: lines[:-1], lambda lines: [lines[0], *lines[:0:-1]],
        lambda lines: [*lines, lines[1]], lambda lines: lines[:1], lambda _: [],
        lambda lines: [*lines[:2], "", *lines[2:]], lambda lines: [*lines[:2], "{", *lines[2:]],
        lambda lines: [*lines[:2], "[1]"], lambda _: ['{"a": 1, "a": 2}'],
        lambda lines: [lines[0], r'{"id": "\ud800"}'], lambda lines: [lines[0], *lines],
    ):  # fmt: skip
        path = write(tmp_path)
        lines = change(path.read_text(encoding="utf-8").splitlines())
        path.write_text("\n".join(lines), encoding="utf-8")
        with pytest.raises(MeasureError):
            read_measurement(path)
    path.write_bytes(b"\xff\xfe")
    for place in (path, tmp_path, tmp_path / "none"):
        with pytest.raises(MeasureError):
            read_measurement(place)
    path = write(tmp_path)
    for bound, most in (("_MOST_BYTES", 700), ("_LONGEST_LINE", 300)):
        monkeypatch.setattr(measurement_file, bound, most)
        with pytest.raises(MeasureError, match=rf"r:\d: more than {most} bytes, which no measure"):
            read_measurement(path)


def test_the_identity_of_prompts_is_theirs_and_their_order() -> None:
    one, other = ("a", "b", "c"), ("d", "e", "f")
    assert len({prompts_sha256(each) for each in ([one, other], [other, one], [one], [])}) == 4


# ---- `draftquant measure`: what it prints, records and refuses, and which draft a server runs


PROMPT_LINES = [
    {"id": f"p{i}", "category": "code" if i % 2 else "chat", "token_ids": [i, i + 1]}
    for i in range(6)
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in PROMPT_LINES), encoding="utf-8")
    return path


def measured(running: VLLMServer, prompts: Path, out: str, *options: str) -> int:
    """The exit code."""
    asked = ["--server", running.url, "--engine", "vllm", "--prompts", str(prompts)]
    where = ["--out", str(prompts.with_name(out)), "--attempts", "1", "--max-new-tokens", "12"]
    return main(["measure", *asked, *where, *options])


def test_a_server_that_runs_another_draft_is_refused(running: VLLMServer, prompts: Path) -> None:
    """And of one that is called otherwise both names are kept, shown, and said by the gate."""
    served_draft: dict[str, Any] = {"model": "/mnt/other"}
    running.config = {"vllm_config": {"speculative_config": served_draft}}
    draft = ("--draft", str(corpus.draft("eagle3-llama")))
    assert measured(running, prompts, "r", *draft) == 2
    assert not [*prompts.parent.glob("r*")]
    assert measured(running, prompts, "r", "--served-as", "/mnt/other") == 2
    assert measured(running, prompts, "r", *draft, "--served-as", "/mnt/other") == 0
    read_measurement(prompts.with_name("r"))
    # Of one name and in one place of two machines: what the server tells is all there is.
    running.asked.clear()
    running.status = lambda number: 200 if number < 4 else 0
    assert measured(running, prompts, "s", "--concurrency", "1") == 2
    running.status = lambda _number: 200
    served_draft["model"] = "/drafts/bf16"
    assert measured(running, prompts, "s", "--concurrency", "1") == 2


def test_what_a_user_has_to_know(
    running: VLLMServer, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTQUANT_SERVER_KEY", "secret-key")
    running.status = lambda number: 200 if number < 5 else 500
    assert measured(running, prompts, "r", "--concurrency", "1") == 2
    running.status = lambda number: 500 if number == 9 else 200
    assert measured(running, prompts, "r", "--concurrency", "1", "--attempts", "2") == 0
    running.status = lambda _: 200
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(round(seconds, -2))

    with monkeypatch.context() as patient:
        patient.setattr(asyncio, "sleep", sleep)
        assert measured(running, prompts, "t", "--max-requests-per-second", "0.01") == 0
    read = read_measurement(prompts.with_name("t"))
    assert [pause for pause in pauses if pause] == [100 * i for i in range(1, len(read.records))]
    running.metrics = "none"
    speculation = {"rejection_sample_method": "synthetic"}
    running.config = {"vllm_config": {"speculative_config": speculation}}
    assert measured(running, prompts, "s", "--concurrency", "4") == 0
    assert running.keys == {"Bearer secret-key"}
    assert "secret-key" not in prompts.with_name("r").read_text(encoding="utf-8")


def test_what_is_refused(running: VLLMServer, prompts: Path) -> None:
    for options in (
        *(("--concurrency", "0"), ("--top-k", "3"), ("--timeout", "nan")),
        *(("--max-requests-per-second", "-1"), ("--server", "localhost")),
        *(("--draft", "/nowhere"), ("--model", "other"), ("--prompts", "/nowhere")),
        ("--out", "/nowhere/r"),
    ):
        assert measured(running, prompts, "r", *options) == 2
        assert sorted(prompts.parent.iterdir()) == [prompts]
    given = {"server": "http://x", "engine": "vllm", "prompts": "p", "out": "r"}
    for left_out in given:
        words = [word for name, value in given.items() if name != left_out
                 for word in (f"--{name}", value)]  # fmt: skip
        assert main(["measure", *words]) == 2


ROOT = {"root": "/models/target", "max_model_len": 4096}
SERVER = ServerIdentity(engine="vllm", version="0.32.0", model="the-target", arguments=ROOT)


@pytest.fixture
def plain() -> Path:
    return corpus.draft("eagle3-llama")


@pytest.fixture
def int4() -> Path:
    return corpus.quantized("eagle3-llama", "int4-channel")


def told(draft: DraftIdentity, named: str | None, quantization: str | None = None) -> Speculation:
    served = Speculation(num_draft_tokens=3, draft=named, draft_quantization=quantization)
    return identified(served, draft, SERVER)


def test_the_same_folder_by_another_path(plain: Path, int4: Path, tmp_path: Path) -> None:
    mounted, copied = tmp_path / "mnt", tmp_path / "other name"
    mounted.symlink_to(int4)
    shutil.copytree(int4, copied)
    for named, how in ((int4, "path"), (mounted, "path"), (copied, "tensors")):
        found = told(draft_identity(str(int4)), str(named), "compressed-tensors")
        assert (found.told_by, found.draft, found.served_draft) == (how, int4.name, str(named))
        assert found.draft_quantization == "int4-channel"
        assert found.served_quantization == "compressed-tensors"
    with pytest.raises(
        MeasureError, match=f"the draft that the server runs, '.*', got '{int4.name}'"
    ):
        told(draft_identity(str(int4)), str(plain))


def test_another_machine_has_the_draft_by_its_name_or_by_what_the_user_says(int4: Path) -> None:
    name = int4.name
    draft = draft_identity(str(int4))
    for named in (f"/elsewhere/{name}", f"a/{name}", f"/c/models--me--{name}/snapshots/1f"):
        assert told(draft, named).told_by == "name"
    for named in ("/elsewhere/bf16", f"someone/{name}-gptq", f"{name}/bf16", "/" + "x" * 5000):
        with pytest.raises(MeasureError, match="--served-as") as caught:
            told(draft, named)
        assert caught.value.where == "--draft"
    of_the_hub = replace(draft, draft="someone/a-draft", folder=Path("/c/models--b--x/snapshots/1"))
    assert told(of_the_hub, "/d/models--someone--a-draft/snapshots/2").told_by == "name"
    draft = draft_identity(str(int4), served_as="/draft")
    found = told(draft, "/draft")
    assert (found.told_by, found.served_draft, found.draft) == ("user", "/draft", name)
    for other, shown in (("/draft2", "'/draft2', got"), (None, "None")):
        with pytest.raises(MeasureError, match=f"what the server calls its draft, {shown}"):
            told(draft, other)
