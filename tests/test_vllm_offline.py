"""The offline engine: what vLLM is asked, and what becomes of its answers and failures.

vLLM here is a module of the test; the real one is started by experiments/served.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording.decoding import Decoding, prompt_seed
from draftquant.calibration.recording.target_shape import RecordingPlan, TargetShape
from draftquant.calibration.vllm.states_file import STATES_KEY
from draftquant.calibration.vllm.vllm_engines import offline_engine
from draftquant.calibration.vllm.vllm_recording import Offline, record_with_vllm
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import TraceError
from states_server import END, VOCAB, write_file, write_target
from tiny_mtp import tiny_mimo_mtp

PROMPTS = [Prompt(id=f"p{i}", category="a", token_ids=(i, i + 1)) for i in range(5)]


class FakeLLM:
    """vLLM's `LLM` and, as `llm_engine`, its engine: one request ends at each step."""

    steps_to_live = 100
    started: dict[str, Any]
    asked: list[tuple[str, dict[str, Any], dict[str, Any]]]

    def __init__(self, **arguments: Any) -> None:
        if arguments.get("tensor_parallel_size", 1) > 1:
            raise ValueError("not so many GPUs\n\nhere")
        type(self).started = arguments
        type(self).asked = []
        self.llm_engine = self
        self.engine_core = self
        self.waiting: list[Any] = []
        self.ended = False

    def shutdown(self) -> None:
        self.ended = True

    def add_request(self, request: str, prompt: Any, params: dict[str, Any]) -> None:
        if prompt["prompt_token_ids"][0] == END:
            raise ValueError("not this one")
        type(self).asked.append((request, prompt, params))
        self.waiting.append((request, prompt["prompt_token_ids"], params))

    def step(self) -> list[Any]:
        type(self).steps_to_live -= 1
        if self.steps_to_live < 0:
            raise RuntimeError("EngineCore died: see above")
        request, prompt, params = self.waiting.pop(0)
        token_ids = [(prompt[-1] + 1 + i) % VOCAB for i in range(params["max_tokens"])]
        session = params["extra_args"]["kv_transfer_params"][STATES_KEY]
        extra = self.started["kv_transfer_config"]["kv_connector_extra_config"]
        name = f"{session}-{request}.safetensors"
        folder = Path(extra["draftquant_folder"])
        folder.mkdir(exist_ok=True)
        write_file(folder / name, [*prompt, *token_ids[:-1]], (1, 3))
        places = [{t: SimpleNamespace(logprob=-0.25), 40: SimpleNamespace(logprob=-4.0)}
                  for t in token_ids]  # fmt: skip
        done = SimpleNamespace(token_ids=token_ids, finish_reason="length", logprobs=places)
        answer = {
            "request_id": request,
            "outputs": [done],
            "kv_transfer_params": {STATES_KEY: name},
        }
        return [SimpleNamespace(finished=False), SimpleNamespace(finished=True, **answer)]


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    module.LLM = FakeLLM  # type: ignore[attr-defined]
    module.SamplingParams = dict  # type: ignore[attr-defined]
    params.RequestOutputKind = SimpleNamespace(FINAL_ONLY=2)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(FakeLLM, "steps_to_live", 100)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


def plan(target: Path, **changes: Any) -> RecordingPlan:
    arguments: dict[str, Any] = {
        "prompts": PROMPTS,
        "max_new_tokens": 4,
        "aux_layer_ids": (0, 2),
        "decoding": Decoding(logprobs=True),
        "dtype": "bfloat16",
        "batch_size": 2,
    }
    return RecordingPlan(target=target, shape=TargetShape.read(target), **(arguments | changes))


def test_the_engine_is_started_and_asked_as_recording_needs(target: Path, tmp_path: Path) -> None:
    traces = record_with_vllm(plan(target), Offline(arguments={"seed": 1}), tmp_path / "out")
    assert FakeLLM.started["seed"] == 1
    assert FakeLLM.started["model"] == str(target)
    extra = FakeLLM.started["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra == {"draftquant_folder": str(tmp_path / "out.recording" / "states")}
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    request, prompt, params = FakeLLM.asked[0]
    assert (request, prompt) == ("0", {"prompt_token_ids": [0, 1]})
    assert (params["temperature"], params["max_tokens"], params["logprobs"]) == (0, 4, 0)
    assert (params["seed"], params["ignore_eos"]) == (None, False)
    assert [trace.continuation for trace in traces] == [
        tuple(range(i + 2, i + 6)) for i in range(len(PROMPTS))
    ]
    for trace in traces:
        assert trace.token_logprob is not None
        assert trace.token_logprob.tolist() == [-0.25] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "target"]


def test_the_state_behind_the_last_norm_needs_log_probabilities(
    target: Path, tmp_path: Path
) -> None:
    draft = load_draft(tiny_mimo_mtp(tmp_path / "draft"))
    asked = plan(target, aux_layer_ids=None, fuse_with=draft, decoding=Decoding())
    with pytest.raises(TraceError, match="show how the engine computes that norm") as caught:
        record_with_vllm(asked, Offline(arguments={}), tmp_path / "out")
    assert caught.value.fix == "add --logprobs"


def test_drawn_tokens_have_a_seed_of_their_prompt(target: Path, tmp_path: Path) -> None:
    decoding = Decoding(
        temperature=0.5, top_p=0.8, top_k=7, seed=3, num_top_logprobs=2, ignore_eos=True
    )
    asked = plan(target, decoding=decoding)
    traces = record_with_vllm(asked, Offline(arguments={}), tmp_path / "out")
    for (_, prompt, params), given in zip(FakeLLM.asked, PROMPTS, strict=True):
        assert (params["temperature"], params["top_p"], params["top_k"]) == (0.5, 0.8, 7)
        assert params["seed"] == prompt_seed(3, prompt["prompt_token_ids"])
        assert prompt["prompt_token_ids"] == list(given.token_ids)
        assert (params["logprobs"], params["ignore_eos"]) == (2, True)
    trace = next(iter(traces))
    assert trace.top_token_ids is not None
    assert trace.top_token_ids.tolist() == [[t, 40] for t in trace.continuation]


def test_an_engine_that_dies_leaves_what_was_recorded(target: Path, tmp_path: Path) -> None:
    FakeLLM.steps_to_live = 3
    with pytest.raises(TraceError, match="vLLM: died: EngineCore died: see above") as caught:
        record_with_vllm(plan(target), Offline(arguments={}), tmp_path / "out")
    assert "run the same command again" in caught.value.fix
    assert not (tmp_path / "out").exists()
    FakeLLM.steps_to_live = 100
    # Another number of GPUs is no other recording.
    again = Offline(arguments={"tensor_parallel_size": 1})
    assert len(record_with_vllm(plan(target), again, tmp_path / "out")) == len(PROMPTS)
    assert [request for request, _, _ in FakeLLM.asked] == ["3", "4"]


def test_what_the_engine_refuses(target: Path, tmp_path: Path) -> None:
    source = Offline(arguments={"tensor_parallel_size": 8})
    with pytest.raises(TraceError, match="does not start: not so many GPUs here") as caught:
        record_with_vllm(plan(target), source, tmp_path / "out")
    assert "--engine-arg" in caught.value.fix
    with suppress(ZeroDivisionError), offline_engine({}, plan(target), "0" * 16) as engine:
        _ = 1 / 0
    assert engine._engine.ended
    refused = Prompt(id="no", category="a", token_ids=(END,))
    with pytest.raises(TraceError, match="prompt no: vLLM refuses it: not this one"):
        record_with_vllm(plan(target, prompts=[refused]), Offline(arguments={}), tmp_path / "out")
