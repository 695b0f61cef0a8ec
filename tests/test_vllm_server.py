"""Recording from a vLLM server: traces, resumption, bad answers; the server here is a small one.

The real engine is started by experiments/served.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.api import TraceFolder
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording.decoding import Decoding
from draftquant.calibration.recording.target_shape import RecordingPlan, TargetShape
from draftquant.calibration.server_client import Patience
from draftquant.calibration.vllm import kept_recording as recording_folder
from draftquant.calibration.vllm import states_file as pages
from draftquant.calibration.vllm import vllm_engines as server
from draftquant.calibration.vllm.states_file import (
    ExpectedStates,
    Pages,
    StatesHead,
    check_states,
    read_features,
    write_states,
)
from draftquant.calibration.vllm.vllm_recording import Served, record_with_vllm
from draftquant.recipes.errors import OutputError, ServerError, TraceError
from states_server import VOCAB, WIDTH, StatesServer, served, states_of, write_file, write_target

PROMPTS = [
    Prompt(id=f"p{i}", category="ab"[i % 2], token_ids=tuple(range(i, 2 * i + 2))) for i in range(9)
]
LAYERS = (0, 2)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_PATIENCE", Patience(attempts=5, first_pause=0.01))
    monkeypatch.setattr(recording_folder, "_WAIT", 0.2)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[StatesServer]:
    (tmp_path / "shared").mkdir()
    with served(StatesServer(shared=tmp_path / "shared")) as found:
        yield found


def plan(target: Path, **changes: Any) -> RecordingPlan:
    given: dict[str, Any] = {"prompts": PROMPTS, "max_new_tokens": 6, "aux_layer_ids": LAYERS}
    given |= {"dtype": "bfloat16", "batch_size": 3, **changes}
    return RecordingPlan(target=target, shape=TargetShape.read(target), **given)


def record(running: StatesServer, out: Path, asked: RecordingPlan, **options: Any) -> TraceFolder:
    source = Served(urls=[running.url], folder=running.shared)
    return record_with_vllm(asked, source, out, **options)


def test_traces_hold_what_was_said(running: StatesServer, target: Path, tmp_path: Path) -> None:
    running.max_model_len = 16  # no more than is needed
    traces = record(running, tmp_path / "out", plan(target))
    manifest = traces.manifest
    assert manifest.recorded_by == "vllm 0.32.0"
    assert manifest.features.aux_layer_ids == LAYERS
    assert (manifest.features.dtype, manifest.features.width) == ("bfloat16", 2 * WIDTH)
    assert (manifest.target.name, manifest.target.num_layers) == ("target", 4)
    assert manifest.target.weights_sha256 is not None
    for trace, prompt in zip(traces, PROMPTS, strict=True):
        size, last = len(prompt.token_ids), prompt.token_ids[-1]
        assert (trace.id, trace.category, trace.prompt_length) == (prompt.id, prompt.category, size)
        assert trace.token_ids.tolist() == [*prompt.token_ids, *range(last + 1, last + 7)]
        # Layer i gives the input of layer i + 1.
        expected = states_of(trace.token_ids[:-1].tolist(), (1, 3)).flatten(1)
        assert torch.equal(trace.features, expected)
        assert trace.target_top1[: size - 1].tolist() == [-1] * (size - 1)
        assert trace.target_top1[size - 1 :].tolist() == list(trace.continuation)
        assert trace.token_logprob is None
    assert list(running.shared.iterdir()) == []
    assert not (tmp_path / "out.recording").exists()
    asked = running.asked[0]
    assert (asked["temperature"], asked["top_p"], asked["top_k"]) == (0, 1.0, 0)
    assert (asked["repetition_penalty"], asked["min_p"], asked["model"]) == (1, 0, "the-target")
    assert not asked.keys() & {"seed", "logprobs"}


# ---- a run that ends early


def test_a_second_call_goes_on(running: StatesServer, target: Path, tmp_path: Path) -> None:
    running.status = lambda number: 200 if number <= 4 else 0
    with pytest.raises(
        ServerError, match="run the same command again: the answers so far are kept"
    ):
        record(running, tmp_path / "out", plan(target))
    assert not (tmp_path / "out").exists()
    kept_ones = {int(path.stem) for path in (tmp_path / "out.recording").glob("0*.json")}
    done = len(kept_ones)
    assert 1 <= done <= 4
    (running.shared / "of-another.safetensors").write_text("", encoding="utf-8")
    running.status = lambda _number: 200
    running.asked.clear()
    progress: list[tuple[int, int]] = []
    traces = record(
        running, tmp_path / "out", plan(target), on_progress=lambda *call: progress.append(call)
    )
    asked = {tuple(body["prompt"]) for body in running.asked}
    assert asked == {p.token_ids for i, p in enumerate(PROMPTS) if i not in kept_ones}
    assert progress == [(i, len(PROMPTS)) for i in range(done, len(PROMPTS) + 1)]
    assert [path.name for path in running.shared.iterdir()] == ["of-another.safetensors"]
    (running.shared / "of-another.safetensors").unlink()
    assert traces.sha256 == record(running, tmp_path / "whole", plan(target)).sha256


@pytest.fixture
def other(running: StatesServer) -> Iterator[StatesServer]:
    with served(StatesServer(shared=running.shared)) as found:
        yield found


def test_servers_share_the_requests_and_take_those_of_one_that_died(
    running: StatesServer, other: StatesServer, target: Path, tmp_path: Path
) -> None:
    alone = record(running, tmp_path / "one", plan(target))
    running.asked.clear()
    said: list[str] = []
    both = Served(urls=[running.url, other.url], folder=running.shared, on_warning=said.append)
    traces = record_with_vllm(plan(target), both, tmp_path / "two")
    assert running.asked
    assert other.asked
    assert len(running.asked) + len(other.asked) == len(PROMPTS)
    assert (traces.sha256, said) == (alone.sha256, [])
    other.status = lambda _number: 0
    traces = record_with_vllm(plan(target), both, tmp_path / "three")
    assert traces.sha256 == alone.sha256
    (warning,) = said
    assert warning.startswith(f"{other.url}: no answer after 5 attempt(s): RemoteProtocolError")
    assert warning.endswith("1 of 2 servers take its requests")
    assert list(running.shared.iterdir()) == []
    other.model = "another"
    running.asked.clear()
    with pytest.raises(TraceError, match=f"{other.url}: serves 'another', and {running.url} serve"):
        record_with_vllm(plan(target), both, tmp_path / "out")
    assert not running.asked
    twice = Served(urls=[running.url, f"{running.url}/v1"], folder=running.shared)
    with pytest.raises(TraceError, match=f"--server: {running.url} is given twice"):
        record_with_vllm(plan(target), twice, tmp_path / "out")


def test_another_command_is_refused(running: StatesServer, target: Path, tmp_path: Path) -> None:
    """How many requests are on their way is no difference."""
    running.status = lambda number: 200 if number <= 2 else 400
    with pytest.raises(ServerError, match=r"400 from .*the server says no"):
        record(running, tmp_path / "out", plan(target, batch_size=1))
    running.status = lambda _number: 200
    running.asked.clear()
    for changes, difference in (
        ({"aux_layer_ids": (0, 1)}, r"aux_layer_ids: it was \[0, 2\], now it is \[0, 1\]"),
        ({"decoding": Decoding(temperature=1)}, "decoding: it was {.*'temperature': 0"),
        ({"prompts": PROMPTS[:5]}, "num_prompts: it was 9, now it is 5"),
        ({"prompts": [*PROMPTS[1:], PROMPTS[0]]}, "prompts_sha256: it was"),
        ({"dtype": "float32"}, "dtype: it was .?bfloat16.?, now it is .?float32"),
    ):
        with pytest.raises(OutputError, match=difference) as caught:
            record(running, tmp_path / "out", plan(target, **changes))
        assert f"rm -r {tmp_path / 'out.recording'}" in str(caught.value)
    assert len(record(running, tmp_path / "out", plan(target))) == len(PROMPTS)
    assert len(running.asked) == len(PROMPTS) - 2


def test_what_was_kept_is_hostile_too(running: StatesServer, target: Path, tmp_path: Path) -> None:
    running.status = lambda number: 200 if number <= 4 else 400
    with pytest.raises(ServerError, match="400"):
        record(running, tmp_path / "out", plan(target, batch_size=1))
    running.status = lambda _number: 200
    folder = tmp_path / "out.recording"
    first = min(folder.glob("0*.json"))
    whole = first.read_text(encoding="utf-8")
    wrong = ({"engine": 1}, {"token_ids": [VOCAB] * 6}, {"engine": "vllm 0.33.0"})
    for text in ("{", *(json.dumps(json.loads(whole) | changes) for changes in wrong)):
        first.write_text(text, encoding="utf-8")
        with pytest.raises(TraceError):
            record(running, tmp_path / "out", plan(target))
    (folder / "recording.json").write_text("[]", encoding="utf-8")
    with pytest.raises(OutputError, match="it is not an unfinished recording"):
        record(running, tmp_path / "out", plan(target))


# ---- answers and files that are not what was asked for


Change = Callable[[dict[str, Any]], Any]


def edited(**entries: Any) -> Change:
    """An answer whose choice is changed."""

    def change(answer: dict[str, Any]) -> dict[str, Any]:
        answer["choices"][0] |= entries
        return answer

    return change


def names(file: str) -> Change:
    return lambda answer: answer | {"kv_transfer_params": {"draftquant_states": file}}


BESIDE = {"token_id:7": -0.5, "token_id:8": -0.6}
FEW = {"token_logprobs": [-0.5] * 5, "top_logprobs": [BESIDE] * 6}
FEW_BESIDE = {"token_logprobs": [-0.5] * 6, "top_logprobs": [{"token_id:7": -0.5}] * 6}


def test_answers_that_are_none(running: StatesServer, target: Path, tmp_path: Path) -> None:
    few = plan(target, prompts=PROMPTS[1:2], decoding=Decoding(num_top_logprobs=2))
    for change in [
        edited(token_ids=[9] * 5), edited(finish_reason="abort"), edited(token_ids=[VOCAB] * 6),
        edited(logprobs=FEW), edited(logprobs=FEW_BESIDE), names("../../etc/x.safetensors"),
        names("none.safetensors"), lambda answer: answer | {"kv_transfer_params": None},
        lambda _answer: {"choices": []}, lambda _answer: [],
    ]:  # fmt: skip
        running.change = change
        with pytest.raises((TraceError, ServerError)):
            record(running, tmp_path / "out", few)
        assert not (tmp_path / "out").exists()


def _half(path: Path, token_ids: Any, layer_inputs: Any) -> None:
    write_file(path, token_ids, layer_inputs)
    path.write_bytes(path.read_bytes()[:-10])


def _lost(path: Path, _token_ids: Any, _layer_inputs: Any) -> None:
    path.with_suffix(".failed").write_text("OSError: No space left on device", encoding="utf-8")


FILES: list[tuple[Any, str, str]] = [
        (_half, r"model|bytes|range|size", "its prompt is repeated"),
        (lambda path, ids, layers: write_file(path, ids[:-1], layers),
         r"token_ids: expected I64 \[\d+\], got I64", "--print-server-args"),
        (lambda path, ids, layers: write_file(path, [*ids[:-1], 5], layers),
         "its tokens are not those of the request's answer", "of its own"),
        (lambda path, ids, layers: write_file(path, ids, (*layers, 4)),
         r"hidden_states: expected BF16 \[\d+, 2, 8\], got BF16 \[\d+, 3, 8\]", "--print-server"),
        (lambda path, ids, _layers: write_file(path, ids, (2, 4)),
         "expected the inputs of layers 1 3, got '2 4'", "--print-server-args"),
        (lambda path, ids, layers: write_file(path, ids, layers, engine=""),
         "expected the name of an engine, got ''", "--print-server-args"),
        (_lost, "the engine lost its states: OSError: No space left", "own messages"),
]  # fmt: skip


@pytest.mark.untold
def test_files_of_another_answer(running: StatesServer, target: Path, tmp_path: Path) -> None:
    few = plan(target, prompts=PROMPTS[1:3])
    for write, message, fix in FILES:
        running.write = write
        with pytest.raises(TraceError, match=message) as caught:
            record(running, tmp_path / "out", few)
        assert fix in caught.value.fix
        assert not (tmp_path / "out").exists()
    running.write = write_file
    running.models = lambda: {"data": [{"id": 7}]}  # type: ignore[method-assign]
    assert len(record(running, tmp_path / "out", few)) == 2
    assert running.asked[-1]["model"] == "7"


# ---- refused before anything is asked


def test_what_cannot_be_recorded(running: StatesServer, target: Path, tmp_path: Path) -> None:
    far = [Prompt(id="x", category="a", token_ids=(VOCAB,))]
    with pytest.raises(TraceError, match="token ids below 64"):
        plan(target, prompts=far).check(tmp_path / "out")
    running.max_model_len = 15
    with pytest.raises(TraceError, match=r"its context has 15 tokens, .* needs 16"):
        record(running, tmp_path / "out", plan(target))
    with pytest.raises(OutputError, match="already exists"):
        record(running, tmp_path, plan(target))
    nowhere = Served(urls=[running.url], folder=target / "config.json")
    with pytest.raises(TraceError, match=r"--shared: .* is no folder"):
        record_with_vllm(plan(target), nowhere, tmp_path / "out")
    for data in ([], ["model"], {"0": {"id": "model"}}):
        running.models = lambda data=data: {"data": data}  # type: ignore[method-assign, misc]
        with pytest.raises(TraceError, match="serves no model"):
            record(running, tmp_path / "out", plan(target))
    assert running.asked == []


# ---- pages of hidden states in an engine's cache, and the file that is written of them

HEAD = StatesHead(layer_inputs=(1, 3), engine="vllm 0.32.0")
SLOTS = 2


def cache(blocks: int, rows: int) -> torch.Tensor:
    """Every element another number: [blocks, SLOTS, rows, WIDTH]."""
    count = blocks * SLOTS * rows * WIDTH
    return torch.arange(count, dtype=torch.float32).reshape(blocks, SLOTS, rows, WIDTH)


def test_a_request_is_read_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_PIECE_BYTES", 200)
    stored = cache(6, 4)
    token_ids = list(range(50, 60))
    write_states(tmp_path / "x.safetensors", Pages(stored, 4), [5, 0, 3], token_ids, HEAD, None)
    expected = torch.cat([stored[b].transpose(0, 1) for b in (5, 0, 3)])[:10].flatten(1)
    assert torch.equal(read_features(tmp_path / "x.safetensors"), expected)
    wanted = ExpectedStates(aux_layer_ids=(0, 2), width=WIDTH, dtype="float32")
    assert check_states(tmp_path / "x.safetensors", wanted, token_ids) == "vllm 0.32.0"
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_files_appear_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="9 tokens, but pages for 8"):
        write_states(tmp_path / "x", Pages(cache(4, 4), 4), [1, 2], list(range(9)), HEAD, None)
    monkeypatch.setattr(pages, "_PIECE_BYTES", 1)
    calls: list[Any] = []
    whole = Pages.read

    def broken(self: Pages, slots: torch.Tensor, ready: Any) -> torch.Tensor:
        assert not (tmp_path / "x.safetensors").exists()
        calls.append(slots)
        if len(calls) == 3:
            raise OSError("No space left on device")
        return whole(self, slots, ready)

    monkeypatch.setattr(Pages, "read", broken)
    with pytest.raises(OSError, match="No space left"):
        write_states(tmp_path / "x", Pages(cache(4, 4), 4), [1, 2], list(range(8)), HEAD, None)
    assert list(tmp_path.iterdir()) == []
