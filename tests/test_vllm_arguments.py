"""What vLLM is started with so that it records, offline or as a server; and the command line."""

import json
import os
import shlex
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
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.calibration.vllm import vllm_engines as answers
from draftquant.calibration.vllm.kept_recording import EngineSetup
from draftquant.calibration.vllm.states_file import STATES_KEY
from draftquant.calibration.vllm.vllm_engines import Continuation, offline_engine
from draftquant.calibration.vllm.vllm_recording import Offline, record_with_vllm
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import TraceError
from draftquant.scripts.cli import main
from states_server import END, VOCAB, StatesServer, served, write_file, write_target
from tiny_mtp import tiny_mimo_mtp


def setup(**changes: Any) -> EngineSetup:
    given = changes.pop("given", {})
    sizes = {"num_layers": 61, "vocab_size": 7, "hidden_size": 5, "max_positions": None}
    sizes |= {name: changes.pop(name) for name in ["plain_latent_rope"] if name in changes}
    decoding = Decoding(num_top_logprobs=changes.pop("num_top_logprobs", 0))
    arguments: dict[str, Any] = {
        "target": Path("/models/a target"),
        "shape": TargetShape(**sizes),
        "prompts": [Prompt(id="p", category="a", token_ids=(1,) * 290)],
        "max_new_tokens": 10,
        "decoding": decoding,
        "aux_layer_ids": (1, 29, 57),
        "dtype": "bfloat16",
    }
    return EngineSetup(RecordingPlan(**(arguments | changes)), Path("/shared"), given)


def arguments(**changes: Any) -> str:
    """Which are kept in told/vllm_arguments.txt."""
    return json.dumps(setup(**changes).arguments(), indent=1)


def test_the_arguments_of_an_engine() -> None:
    given = {"tensor-parallel-size": 8, "max_model_len": 4096, "quantization": "fp8"}
    assert arguments() != arguments(given=given)
    assert arguments() == arguments(num_top_logprobs=20) != arguments(num_top_logprobs=30)


def test_plain_rotary_angles_of_latent_attention_are_computed_by_torch() -> None:
    def config(**given: Any) -> object:
        return setup(plain_latent_rope=True, given=given).arguments()["compilation_config"]

    assert config() == {"custom_ops": ["-rotary_embedding"]}
    both = {"mode": 3, "custom_ops": ["+rms_norm", "-rotary_embedding"]}
    assert config(compilation_config={"mode": 3, "custom_ops": ["+rms_norm"]}) == both
    assert config(compilation_config=both) == both
    for wrong in (3, {"custom_ops": "none"}):
        with pytest.raises(TraceError, match="expected an object, to which -rotary_embedding"):
            config(compilation_config=wrong)
    words = shlex.split(setup(plain_latent_rope=True).command())
    value = words[words.index("--compilation-config") + 1]
    assert json.loads(value) == {"custom_ops": ["-rotary_embedding"]}


def test_which_targets_have_plain_rotary_angles(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "vocab_size": 7, "hidden_size": 5}
    yarn, plain = {"rope_type": "yarn", "factor": 4}, {"rope_type": "default", "rope_theta": 1e4}
    for config, expected in (
        ({"kv_lora_rank": 512}, True),
        ({}, False),
        ({"kv_lora_rank": 512, "rope_scaling": {"type": "yarn", "factor": 4}}, False),
        ({"kv_lora_rank": 512, "rope_parameters": plain}, True),
        ({"kv_lora_rank": 512, "rope_parameters": yarn}, False),
    ):
        (tmp_path / "config.json").write_text(json.dumps(sizes | config), encoding="utf-8")
        assert TargetShape.read(tmp_path).plain_latent_rope == expected


def test_arguments_that_contradict_recording() -> None:
    for given in (
        {"enable-prefix-caching": False}, {"speculative_config": {}}, {"model": "x"},
        {"decode_context_parallel_size": 2}, {"prefill_context_parallel_size": 2},
        {"max_model_len": 299}, {"max_model_len": "auto"},
    ):  # fmt: skip
        with pytest.raises(TraceError):
            setup(given=given).arguments()
    with pytest.raises(TraceError):
        setup(dtype="float64").arguments()


# ---- many prompts


class _Slow:
    """Answers the oldest prompt; notes how many were in flight."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.most = 0

    def submit(self, position: int, _prompt: Prompt) -> None:
        self.waiting.append(position)
        self.most = max(self.most, len(self.waiting))

    def next_answer(self) -> tuple[int, Continuation]:
        return self.waiting.pop(0), Continuation(token_ids=(1,), ended="length", states="x")


def asked(engine: _Slow, **changes: int) -> list[int]:
    prompts = [(i, Prompt(id=f"p{i}", category="a", token_ids=(1,) * 10)) for i in range(20)]
    limits = {"most_in_flight": 4, "bytes_per_token": 2, "max_new_tokens": 5} | changes
    return [position for position, _ in answers.answers(engine, prompts, **limits)]


def test_only_so_many_prompts_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """By number, and by unread bytes: 30 of each, and one alone may be larger."""
    for most, bytes_per_token in ((4, 2), (2, 2), (1, 100)):
        engine = _Slow()
        assert asked(engine, bytes_per_token=bytes_per_token) == list(range(20))
        assert engine.most == most
        monkeypatch.setattr(answers, "_MAX_UNREAD_BYTES", 65)


# ---- the command


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    lines = [{"id": f"p{i}", "category": "a", "token_ids": [i + 1, i + 2]} for i in range(3)]
    (tmp_path / "prompts").write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    target = write_target(tmp_path / "target")
    return [
        *("record", "--target", str(target), "--prompts", str(tmp_path / "prompts")),
        *("--max-new-tokens", "4", "--aux-layers", "0,2"),
    ]


def test_the_command_prints_how_to_start_a_server(command: list[str], tmp_path: Path) -> None:
    more = ["--engine", "vllm", "--shared", str(tmp_path / "states"), "--print-server-args"]
    arguments = ["--engine-arg", "tensor-parallel-size=8", "--engine-arg", "tokenizer=a b"]
    assert main([*command, *more, *arguments]) == 0
    for text in ("tensor-parallel-size", "=8", " =8"):
        with pytest.raises(SystemExit, match="2"):
            main([*command, *more, "--engine-arg", text])


def test_the_command_records_from_a_server(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    with served(StatesServer(shared=tmp_path / "shared")) as running:
        more = ["--engine", "vllm", "--server", f"{running.url}/v1/", "--shared"]
        out = ["--logprobs", "--out", str(tmp_path / "out")]
        assert main([*command, *more, str(running.shared), *out]) == 0
    traces = TraceFolder.open(tmp_path / "out")
    assert next(iter(traces)).token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert traces.manifest.logprobs is not None


# ---- the offline engine: vLLM here is a module of the test; experiments/served starts the real one

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
        logprobs = {40: SimpleNamespace(logprob=-4.0), 41: SimpleNamespace(logprob=-3.0)}
        places = [{t: SimpleNamespace(logprob=-0.25), **logprobs} for t in token_ids]
        done = SimpleNamespace(token_ids=token_ids, finish_reason="length", logprobs=places)
        said = {"request_id": request, "outputs": [done], "kv_transfer_params": {STATES_KEY: name}}
        return [SimpleNamespace(finished=False), SimpleNamespace(finished=True, **said)]


@pytest.fixture
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
def target(tmp_path: Path, _vllm: None) -> Path:
    return write_target(tmp_path / "target")


def plan(target: Path, **changes: Any) -> RecordingPlan:
    given: dict[str, Any] = {"prompts": PROMPTS, "max_new_tokens": 4, "aux_layer_ids": (0, 2)}
    given |= {"decoding": Decoding(logprobs=True), "dtype": "bfloat16", "batch_size": 2}
    return RecordingPlan(target=target, shape=TargetShape.read(target), **(given | changes))


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
    assert (params["seed"], params["ignore_eos"], params["output_kind"]) == (None, False, 2)
    wanted = [tuple(range(i + 2, i + 6)) for i in range(len(PROMPTS))]
    assert [trace.continuation for trace in traces] == wanted
    for trace in traces:
        assert trace.token_logprob is not None
        assert trace.token_logprob.tolist() == [-0.25] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "target"]


def test_a_state_behind_the_last_norm_needs_log_probabilities(target: Path, tmp_path: Path) -> None:
    draft = load_draft(tiny_mimo_mtp(tmp_path / "draft"))
    asked = plan(target, aux_layer_ids=None, fuse_with=draft, decoding=Decoding())
    with pytest.raises(TraceError):
        record_with_vllm(asked, Offline(arguments={}), tmp_path / "out")


def test_drawn_tokens_have_a_seed_of_their_prompt(target: Path, tmp_path: Path) -> None:
    how = Decoding(temperature=0.5, top_p=0.8, top_k=7, seed=3, num_top_logprobs=2, ignore_eos=True)
    asked = plan(target, decoding=how)
    traces = record_with_vllm(asked, Offline(arguments={}), tmp_path / "out")
    for (_, prompt, params), given in zip(FakeLLM.asked, PROMPTS, strict=True):
        assert (params["temperature"], params["top_p"], params["top_k"]) == (0.5, 0.8, 7)
        assert params["seed"] == prompt_seed(3, prompt["prompt_token_ids"])
        assert prompt["prompt_token_ids"] == list(given.token_ids)
        assert (params["logprobs"], params["ignore_eos"]) == (2, True)
    trace = next(iter(traces))
    assert trace.top_token_ids is not None
    assert trace.top_token_ids.tolist() == [[t, 41] for t in trace.continuation]


def test_an_engine_that_dies_leaves_what_was_recorded(target: Path, tmp_path: Path) -> None:
    FakeLLM.steps_to_live = 3
    with pytest.raises(TraceError):
        record_with_vllm(plan(target), Offline(arguments={}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    FakeLLM.steps_to_live = 100
    # Another number of GPUs is no other recording.
    again = Offline(arguments={"tensor_parallel_size": 1})
    assert len(record_with_vllm(plan(target), again, tmp_path / "out")) == len(PROMPTS)
    assert [request for request, _, _ in FakeLLM.asked] == ["3", "4"]


def test_what_the_engine_refuses(target: Path, tmp_path: Path) -> None:
    source = Offline(arguments={"tensor_parallel_size": 8})
    with pytest.raises(TraceError):
        record_with_vllm(plan(target), source, tmp_path / "out")
    with suppress(ZeroDivisionError), offline_engine({}, plan(target), "0" * 16) as engine:
        _ = 1 / 0
    assert engine._engine.ended
    refused = Prompt(id="no", category="a", token_ids=(END,))
    with pytest.raises(TraceError, match="prompt no: vLLM refuses it: not this one"):
        record_with_vllm(plan(target, prompts=[refused]), Offline(arguments={}), tmp_path / "out")
