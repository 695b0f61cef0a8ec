"""What an engine is to record, and what of it is done.

The engine keeps hidden states by vLLM's own method `extract_hidden_states`, and `connector`
writes them. What is done is in a folder beside the output, which a run that dies leaves behind:

    OUT.recording/
        recording.json        what is recorded; another command is refused
        states/               where the engine writes, if it is our own
        00000.safetensors     hidden states of the first prompt, as the engine wrote them
        00000.json            its answer; written last, so it shows that the prompt is done
"""

import dataclasses
import hashlib
import json
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...quantize.files.result_cache import resumable_folder, write_whole
from ...recipes.errors import TraceError, short
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..prompts.prompt_file import Prompt
from ..recording.target_shape import RecordingPlan
from ..traces.manifest import TargetIdentity
from .states_file import FAILED, FOLDER_KEY, ExpectedStates, check_states, layer_inputs
from .vllm_engines import Continuation

LOGPROBS_MODE = "processed_logprobs"
_PACKAGE = __package__
_VLLM_MAX_LOGPROBS = 20  # vLLM's limit by default

_NATIVE_ROPE = "-rotary_embedding"

_OURS = {
    "model": "give --target",
    "dtype": "give --dtype",
    "speculative_config": "hidden states are extracted by a method of its own",
    "kv_transfer_config": "draftquant's connector writes the hidden states",
    "scheduler_cls": "draftquant's proposes nothing, so that decoding is what it is without draft",
    "enable_prefix_caching": "what is taken from the cache has no hidden states",
    "logprobs_mode": f"traces hold {LOGPROBS_MODE}",
    "async_scheduling": "the scheduler that proposes nothing does not run ahead",
    "decode_context_parallel_size": "it spreads the states of one request over GPUs",
    "prefill_context_parallel_size": "it spreads the states of one request over GPUs",
}
"""Arguments that the recorder sets or rules out, and why."""


def check_last_norm(plan: RecordingPlan) -> None:
    """Refuse a plan from which the target's last norm cannot be determined."""
    if plan.reads_last_state and plan.decoding.logprob_spec is None:
        raise TraceError(
            "--logprobs",
            "the draft reads the state after the target's last norm, which engines do not return:"
            " log-probabilities show how the engine computes that norm",
            fix="add --logprobs",
        )


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What a plan needs from the engine, whose workers write into `folder`, besides `given`."""

    plan: RecordingPlan
    folder: Path
    given: Mapping[str, object]

    def arguments(self) -> dict[str, object]:
        """Arguments for `vllm.LLM`; refused where the user's contradict what recording needs."""
        given = {name.replace("-", "_"): value for name, value in self.given.items()}
        self._check(given)
        plan = self.plan
        logprobs = max(plan.decoding.num_top_logprobs, _VLLM_MAX_LOGPROBS)
        layers = layer_inputs(plan.features.aux_layer_ids)
        return {
            "model": str(plan.target),
            "dtype": plan.dtype,
            "max_model_len": plan.max_model_len,
            **({"max_logprobs": logprobs} if logprobs > _VLLM_MAX_LOGPROBS else {}),
            **given,
            **self._native_rope(given),
            "enable_prefix_caching": False,
            "logprobs_mode": LOGPROBS_MODE,
            "async_scheduling": False,  # 0.33 turns it on with GPUs, whatever the scheduler
            "scheduler_cls": f"{_PACKAGE}.scheduler.PlainScheduler",
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {
                    "hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}
                },
            },
            "kv_transfer_config": {
                "kv_connector": "StatesConnector",
                "kv_connector_module_path": f"{_PACKAGE}.connector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {FOLDER_KEY: str(self.folder.absolute())},
            },
        }

    def _native_rope(self, given: Mapping[str, object]) -> dict[str, object]:
        """For MLA without yarn, compute rotary angles in torch instead of a kernel.

        vLLM 0.32's kernel for CPUs reads queries and keys [tokens, heads, 64] as two-dimensional:
        hidden states are silently off by a fifth. Yarn never uses that kernel.
        """
        if not self.plan.shape.plain_latent_rope:
            return {}
        config = given.get("compilation_config", {})
        chosen = config.get("custom_ops", []) if isinstance(config, Mapping) else None
        if not isinstance(config, Mapping) or not isinstance(chosen, list):
            where = "--engine-arg compilation_config"
            raise TraceError(
                where,
                f"expected an object, to which {_NATIVE_ROPE} is added for this target, got"
                f" {short(config)}",
                fix='give it as {"mode": 3}, for example',
            )
        missing = [] if _NATIVE_ROPE in chosen else [_NATIVE_ROPE]
        return {"compilation_config": {**config, "custom_ops": [*chosen, *missing]}}

    def command(self) -> str:
        """The shell command that starts a server with these arguments."""
        check_last_norm(self.plan)
        arguments = self.arguments()
        words = ["vllm", "serve", str(arguments.pop("model"))]
        for name, value in arguments.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
                words += [f"--{flag}", text]
        return shlex.join(words)

    def _check(self, given: Mapping[str, object]) -> None:
        for name in given.keys() & _OURS.keys():
            raise TraceError(f"--engine-arg {name}", f"cannot be given: {_OURS[name]}",
                             fix="leave it out")  # fmt: skip
        if self.plan.dtype == "float64":
            raise TraceError("--dtype", "vLLM does not compute in float64",
                             fix="give bfloat16, float16 or float32")  # fmt: skip
        longest, least = given.get("max_model_len"), self.plan.max_model_len
        if longest is not None and (type(longest) is not int or longest < least):
            where = "--engine-arg max_model_len"
            raise TraceError(
                where,
                f"expected at least {least}, the longest prompt with its continuation, got"
                f" {short(longest)}",
                fix="give a larger number, or leave it out",
            )


def plan_json(plan: RecordingPlan, identity: TargetIdentity) -> dict[str, Any]:
    """What must be equal for a recording to resume. How the engine runs may change."""
    prompts = hashlib.sha256()
    for prompt in plan.prompts:
        prompts.update(f"{prompt.id}\0{prompt.category}\0{prompt.token_ids}\0".encode())
    return {
        "target": dataclasses.asdict(identity),
        "num_prompts": len(plan.prompts),
        "prompts_sha256": prompts.hexdigest(),
        "max_new_tokens": plan.max_new_tokens,
        "decoding": dataclasses.asdict(plan.decoding),
        "aux_layer_ids": list(plan.features.aux_layer_ids),
        "dtype": plan.dtype,
    }


RECORDING = ".recording"  # after the name of the output
_PLAN_FILE = "recording.json"
_WAIT = 120.0  # seconds, for a file that an answer names
_POLL = 0.02


class KeptRecording:
    """The folder; made by `kept_recording`."""

    def __init__(self, folder: Path, plan: RecordingPlan) -> None:
        self.states_folder = folder / "states"
        self._folder, self._plan = folder, plan
        self.expected = ExpectedStates(
            aux_layer_ids=plan.features.aux_layer_ids,
            width=plan.shape.hidden_size,
            dtype=plan.dtype,
        )

    def missing(self) -> list[int]:
        """Positions that have no answer yet."""
        done = _answered(self._folder)
        return [i for i in range(len(self._plan.prompts)) if f"{i:05d}.json" not in done]

    def take(self, position: int, answer: Continuation, shared: Path) -> None:
        """Check an answer, wait for its states, and keep both."""
        self._check(position, answer)
        prompt = self._plan.prompts[position]
        written = shared / _file_name(answer.states, prompt)
        _wait_for(written, prompt)
        read = [*prompt.token_ids, *answer.token_ids[:-1]]
        engine = check_states(written, self.expected, read)
        shutil.move(written, self.states(position))
        text = json.dumps(dataclasses.asdict(answer) | {"engine": engine})
        write_whole(self._folder / f"{position:05d}.json", text)

    def answer(self, position: int) -> tuple[Continuation, str]:
        """What was kept for a prompt, and the engine that produced it."""
        path = self._folder / f"{position:05d}.json"
        try:
            kept: _Kept = decode(_Kept, parse_object(read_text(path)))
        except (OSError, JsonProblem) as exc:
            raise TraceError(path, f"this is not an answer of an unfinished run: {exc}",
                             fix=f"rm {path}, and run again") from exc  # fmt: skip
        self._check(position, kept)
        read = [*self._plan.prompts[position].token_ids, *kept.token_ids[:-1]]
        check_states(self.states(position), self.expected, read)
        return kept, kept.engine

    def states(self, position: int) -> Path:
        """The file of a prompt's hidden states."""
        return self._folder / f"{position:05d}.safetensors"

    def _check(self, position: int, answer: Continuation) -> None:
        where = f"prompt {self._plan.prompts[position].id}"
        count = len(answer.token_ids)
        if answer.ended not in ("stop", "length"):
            raise TraceError(where, f"the engine ended it with {short(answer.ended)}",
                             fix="see the engine's own messages")  # fmt: skip
        wrong = count < 1 or count > self._plan.max_new_tokens
        if wrong or (answer.ended == "length" and count != self._plan.max_new_tokens):
            raise TraceError(
                where,
                f"asked for {self._plan.max_new_tokens} tokens, got {count} and {answer.ended!r}",
                fix="start the engine without a limit of its own, such as max_new_tokens in"
                " --override-generation-config",
            )
        vocab_size, asked = self._plan.shape.vocab_size, self._plan.decoding.logprob_spec
        if not all(0 <= token < vocab_size for token in answer.token_ids):
            raise TraceError(where, f"expected token ids in [0, {vocab_size})",
                             fix="serve the target that is given here")  # fmt: skip
        if asked is not None:
            given = len(answer.token_logprob or ())
            places = [len(place) for place in answer.top or ()]
            num_top = asked.num_top
            if given != count or places != [num_top] * (count if num_top else 0):
                raise TraceError(
                    where,
                    f"asked for log-probabilities of {count} tokens and of {num_top} beside each,"
                    f" got {given} and {short(places)}",
                    fix="start the engine with at least this --max-logprobs",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept(Continuation):
    engine: str


@contextmanager
def kept_recording(out: Path, plan: Mapping[str, Any]) -> Iterator[Path]:
    """Begin a recording, or resume one of the same plan, with exclusive use of the folder."""
    folder = out.with_name(out.name + RECORDING)
    with resumable_folder(folder, "recording", plan):
        try:
            yield folder
        finally:
            if not _answered(folder):  # nothing to resume from
                shutil.rmtree(folder, ignore_errors=True)


def _answered(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.json")} - {_PLAN_FILE}


def _file_name(name: str, prompt: Prompt) -> str:
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise TraceError(
            f"prompt {prompt.id}",
            f"expected the answer to name a file of hidden states, got {short(name)}",
            fix="start the engine with the arguments of 'draftquant record --print-server-args'",
        )
    return name


def _wait_for(path: Path, prompt: Prompt) -> None:
    failed = path.with_suffix(FAILED)
    end = time.monotonic() + _WAIT
    while not path.exists():
        if failed.exists():
            raise TraceError(f"prompt {prompt.id}", f"the engine lost its states: {_why(failed)}",
                             fix="see the engine's own messages, and run again")  # fmt: skip
        if time.monotonic() > end:
            raise TraceError(
                path,
                f"did not appear within {_WAIT:.0f} seconds after the answer to prompt {prompt.id}",
                fix="give --shared the folder that the engine's machine writes into",
            )
        time.sleep(_POLL)


def _why(failed: Path) -> str:
    try:
        return read_text(failed)
    except OSError as exc:
        return str(exc)
