"""What vLLM is started with so that it records, offline or as a server; and the command line."""

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording.decoding import Decoding
from draftquant.calibration.recording.target_shape import RecordingPlan, TargetShape
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.calibration.vllm import vllm_engines as answers
from draftquant.calibration.vllm.kept_recording import EngineSetup
from draftquant.calibration.vllm.vllm_engines import Answer, most_likely
from draftquant.recipes.errors import TraceError
from draftquant.scripts.cli import main
from states_server import StatesServer, served, write_target

BASE = "draftquant.calibration.vllm"


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


EXPECTED = {
    "model": "/models/a target",
    "dtype": "bfloat16",
    "max_model_len": 300,
    "enable_prefix_caching": False,
    "logprobs_mode": "processed_logprobs",
    "async_scheduling": False,
    "scheduler_cls": f"{BASE}.scheduler.PlainScheduler",
    "speculative_config": {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}},
    },
    "kv_transfer_config": {
        "kv_connector": "StatesConnector",
        "kv_connector_module_path": f"{BASE}.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"draftquant_folder": "/shared"},
    },
}


def test_the_arguments_of_an_engine() -> None:
    assert setup().arguments() == EXPECTED
    given = {"tensor-parallel-size": 8, "max_model_len": 4096, "quantization": "fp8"}
    expected = EXPECTED | {"tensor_parallel_size": 8, "max_model_len": 4096, "quantization": "fp8"}
    assert setup(given=given).arguments() == expected
    assert setup(num_top_logprobs=30).arguments() == EXPECTED | {"max_logprobs": 30}
    assert "max_logprobs" not in setup(num_top_logprobs=20).arguments()


def test_plain_rotary_angles_of_latent_attention_are_computed_by_torch() -> None:
    def config(**given: Any) -> object:
        return setup(plain_latent_rope=True, given=given).arguments()["compilation_config"]

    assert config() == {"custom_ops": ["-rotary_embedding"]}
    own = {"mode": 3, "custom_ops": ["+rms_norm"]}
    both = {"mode": 3, "custom_ops": ["+rms_norm", "-rotary_embedding"]}
    assert config(compilation_config=own) == both
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
    for given, message in (
        ({"enable-prefix-caching": False}, "from the cache has no hidden states"),
        ({"speculative_config": {}}, "extracted by a method of its own"),
        ({"model": "x"}, "give --target"),
        ({"decode_context_parallel_size": 2}, "spreads the states"),
        ({"max_model_len": 299}, "expected at least 300, .* got 299"),
        ({"max_model_len": "auto"}, "expected at least 300, .* got 'auto'"),
    ):
        with pytest.raises(TraceError, match=message) as caught:
            setup(given=given).arguments()
        assert "--engine-arg " + next(iter(given)).replace("-", "_") in str(caught.value)
        assert "leave it out" in caught.value.fix
    with pytest.raises(TraceError, match="--dtype: vLLM does not compute in float64"):
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

    def next_answer(self) -> tuple[int, Answer]:
        return self.waiting.pop(0), Answer(token_ids=(1,), ended="length", states="x")


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


def test_the_most_likely_are_sorted_and_bounded() -> None:
    found = most_likely([(7, -2.0), (3, -0.5), (5, -2.0), (1, float("-inf"))], 3)
    assert found == ((3, -0.5), (5, -2.0), (7, -2.0))
    assert most_likely([(1, float("-inf"))], 2) == ((1, -9999.0),)


# ---- the command


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    lines = [{"id": f"p{i}", "category": "a", "token_ids": [i + 1, i + 2]} for i in range(3)]
    (tmp_path / "prompts").write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8"
    )
    target = write_target(tmp_path / "target")
    return [
        *("record", "--target", str(target), "--prompts", str(tmp_path / "prompts")),
        *("--max-new-tokens", "4", "--aux-layers", "0,2"),
    ]


def test_the_command_prints_how_to_start_a_server(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    more = ["--engine", "vllm", "--shared", str(tmp_path), "--print-server-args"]
    arguments = ["--engine-arg", "tensor-parallel-size=8", "--engine-arg", "tokenizer=a b"]
    assert main([*command, *more, *arguments]) == 0
    out, err = capsys.readouterr()
    words = shlex.split(out)
    assert words[words.index("--max-model-len") + 1] == "6"
    assert words[words.index("--tensor-parallel-size") + 1] == "8"
    assert words[words.index("--tokenizer") + 1] == "a b"
    assert words[words.index("--dtype") + 1] == "bfloat16"
    assert "--no-enable-prefix-caching" in words
    states = json.loads(words[words.index("--kv-transfer-config") + 1])
    folder = {"draftquant_folder": str(tmp_path)}
    assert states == EXPECTED["kv_transfer_config"] | {"kv_connector_extra_config": folder}
    assert err == ""


def test_the_command_records_from_a_server(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    with served(StatesServer(shared=tmp_path / "shared")) as running:
        more = ["--engine", "vllm", "--server", f"{running.url}/v1/", "--shared"]
        out = ["--logprobs", "--out", str(tmp_path / "out")]
        assert main([*command, *more, str(running.shared), *out]) == 0
    assert "3 traces, 18 tokens" in capsys.readouterr().out
    traces = TraceFolder.open(tmp_path / "out")
    assert next(iter(traces)).token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert traces.manifest.logprobs is not None


MISTAKES = [
        (["--engine", "sglang", "--out", "x"], "--engine sglang: SGLang 0.5.23 captures layers"),
        (["--server", "http://a", "--out", "x"], "--server: belongs to vLLM, not to transformers"),
        (["--print-server-args"], "--print-server-args: belongs to vLLM"),
        (["--engine", "vllm", "--server", "http://a", "--out", "x"], "--shared: expected the"),
        (["--engine", "vllm", "--shared", ".", "--out", "x"], "--shared: an engine of our own"),
        (["--engine", "vllm", "--server", "http://a", "--shared", ".", "--engine-arg", "a=1"],
         "--engine-arg: a running server has its arguments"),
        ([], "--out: expected the folder to create"),
        (["--engine", "vllm", "--out", "x", "--top-p", "0.5"], "--temperature"),
        (["--engine", "vllm", "--engine-arg", " =1"], "expected NAME=VALUE"),
]  # fmt: skip


def test_arguments_that_do_not_belong_together(
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for more, message in MISTAKES:
        with suppress(SystemExit):
            assert main([*command, *more]) == 2
        assert message in capsys.readouterr().err
        assert [*tmp_path.glob("x*")] == []
