"""The drafts that are served: the shipped pairs, as they are, by every recipe, and transcoded."""

import os
import subprocess
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import yaml
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.recipes import built_in_recipes, load_recipe, to_mapping
from draftquant.scripts.cli import main as draftquant
from mixes import DOWN, FP8, INT4_CHANNEL, mixed
from served.serve import ENVIRONMENT

PAIRS = Path(__file__).resolve().parents[2] / "tests" / "pairs"
NUM_PROMPTS = 16
MAX_NEW_TOKENS = 64
"""Few of both: vLLM's FP8 product on a CPU takes 10 ms per token and linear of these drafts."""
W4A8 = "mi325x-w4a8"
ENGINE_ARGUMENTS = ("--engine-arg", "enforce_eager=true", "--engine-arg", "max_num_seqs=16")
"""Of every recording by vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A shipped pair that vLLM's CPU backend runs.

    Attributes:
        method: vLLM's name of the way of drafting. num_draft_tokens: K.
        recording: arguments of the engine that records the target.
    """

    family: str
    method: str
    num_draft_tokens: int
    recording: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """With target/, draft/ and prompts.jsonl."""
        return PAIRS / self.family

    def write_prompts(self, out: Path, count: int = NUM_PROMPTS) -> Path:
        """The first prompts of the gate."""
        lines = (self.folder / "prompts.jsonl").read_text("utf-8").splitlines(keepends=True)
        out.write_text("".join(lines[:count]), encoding="utf-8")
        return out


SERVED_PAIRS = (
    Pair(family="eagle3-llama", method="eagle3", num_draft_tokens=3),
    Pair(
        family="eagle3-mla",
        method="eagle3",
        num_draft_tokens=3,
        # In float32 the CPU build itself chooses a backend that has no latent attention.
        recording=("--engine-arg", 'attention_config={"backend": "CPU_MLA"}'),
    ),
    Pair(family="dflash", method="dflash", num_draft_tokens=7),
)

UNQUANTIZED = "BF16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One draft to serve.

    Attributes:
        make: writes it into the folder that it is given. plugin: whether vLLM loads draftquant's.
        fp8_cache: whether vLLM is told to keep the draft's keys and values in FP8.
    """

    make: Callable[[Path], None]
    plugin: bool = False
    fp8_cache: bool = False


def record(
    pair: Pair, prompts: Path, out: Path, *options: str, max_new_tokens: int = MAX_NEW_TOKENS
) -> TraceFolder:
    """Traces of the pair's target on a file of prompts, with its tables."""
    _run(
        "record",
        *("--target", pair.folder / "target", "--draft", pair.folder / "draft", "--tables"),
        *("--prompts", prompts, "--max-new-tokens", max_new_tokens, *options),
        *("--out", out),
    )
    return TraceFolder.open(out)


def record_by_engine(
    python: Path, pair: Pair, prompts: Path, out: Path, *options: str
) -> TraceFolder:
    """The same by vLLM, in its own environment and dtype: its text, and its hidden states.

    Raises:
        RuntimeError: it did not end with 0; the message has what it said.
    """
    command = [
        *(str(python), "-m", "draftquant.scripts.cli", "record", "--engine", "vllm"),
        *("--target", str(pair.folder / "target"), "--draft", str(pair.folder / "draft")),
        *("--tables", "--prompts", str(prompts), "--max-new-tokens", str(MAX_NEW_TOKENS)),
        *ENGINE_ARGUMENTS,
        *options,
        *("--out", str(out)),
    ]
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"record --engine vllm ended with {done.returncode}:\n{done.stderr}")
    return TraceFolder.open(out)


NUM_KEPT = 384
"""Rows of the cut heads, of 1,024: those of the tokens that the target said most often."""
CUT = f"cut to {NUM_KEPT} of 1,024 tokens"
CUT_FP8 = f"{CUT}, then fp8-ptpc"
TRANSCODED, WITH_PLUGIN = f"{W4A8}, transcoded", f"{W4A8}, with the plugin"
MIXED = "int4-channel, down_proj in FP8"
_CACHE = "KV cache in FP8"
UNIT_CACHE = f"{UNQUANTIZED}, {_CACHE}, scales of 1"
FP8_CACHE, WITH_PLUGIN_AND_CACHE = (
    f"{name}, {_CACHE}, measured scales" for name in ("fp8-ptpc", WITH_PLUGIN)
)


def draft_names() -> tuple[str, ...]:
    """Those of `drafts`, in their order."""
    of_heads, of_caches = (CUT, CUT_FP8), (UNIT_CACHE, FP8_CACHE, WITH_PLUGIN_AND_CACHE)
    ways = MIXED, TRANSCODED, WITH_PLUGIN
    return UNQUANTIZED, *built_in_recipes(), *ways, *of_heads, *of_caches


def drafts(pair: Pair, calibration: TraceFolder) -> dict[str, Draft]:
    """Every draft to serve, by name.

    They are those as they were trained, by every recipe, in two formats, W4A8 in two more ways, and
    with fewer rows in the head, or with a KV cache in FP8.

    Args:
        pair: whose draft is quantized.
        calibration: traces for static activation scales, and for the choice of rows.
    """

    source = pair.folder / "draft"

    def quantized(recipe: str) -> Callable[[Path], None]:
        chosen = load_recipe(recipe)
        measured = chosen.needs_input_scales or chosen.algorithm.rounding != "nearest"
        given = ("--traces", calibration.folder) if measured else ()
        return lambda out: _run("quantize", source, "--recipe", recipe, *given, "--out", out)

    def in_two_formats(out: Path) -> None:
        recipe = out.with_name("mixed.yaml")
        recipe.write_text(yaml.safe_dump(to_mapping(mixed(INT4_CHANNEL, (FP8, DOWN)))), "utf-8")
        _run("quantize", source, "--recipe", recipe, "--out", out)

    def transcoded(out: Path) -> None:
        codes = out.with_name(f"{out.name} codes")
        quantized(W4A8)(codes)
        layout = ("--layout", "compressed-tensors", "--carrier", "fp8_e4m3")
        _run("transcode", codes, *layout, "--out", out)

    def cut(out: Path) -> None:
        """A block draft, which has no head, gets rows of the target's."""
        given = ("--traces", calibration.folder, "--size", NUM_KEPT)
        head = ("--target", pair.folder / "target") if pair.method == "dflash" else ()
        _run("vocab", source, *given, *head, "--out", out)

    def cut_and_quantized(out: Path) -> None:
        whole = out.with_name(f"{out.name} before")
        cut(whole)
        _run("quantize", whole, "--recipe", "fp8-ptpc", "--out", out)

    def with_measured_cache(recipe: str) -> Callable[[Path], None]:
        given = ("--recipe", recipe, "--kv-cache", "measured", "--traces", calibration.folder)
        return lambda out: _run("quantize", source, *given, "--out", out)

    return {
        UNQUANTIZED: Draft(make=lambda out: out.symlink_to(source)),
        **{recipe: Draft(make=quantized(recipe)) for recipe in built_in_recipes()},
        MIXED: Draft(make=in_two_formats),
        TRANSCODED: Draft(make=transcoded),
        WITH_PLUGIN: Draft(make=quantized(W4A8), plugin=True),
        CUT: Draft(make=cut),
        CUT_FP8: Draft(make=cut_and_quantized),
        UNIT_CACHE: Draft(make=lambda out: out.symlink_to(source), fp8_cache=True),
        FP8_CACHE: Draft(make=with_measured_cache("fp8-ptpc"), fp8_cache=True),
        WITH_PLUGIN_AND_CACHE: Draft(make=with_measured_cache(W4A8), plugin=True, fp8_cache=True),
    }


def dequantized(draft: Path, out: Path) -> Path:
    """The same codes as BF16 weights."""
    _run("dequantize", draft, "--out", out)
    return out


def _run(*arguments: object) -> None:
    """One `draftquant` command, quietly.

    Raises:
        RuntimeError: it did not end with 0; the message has what it said.
    """
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = draftquant([str(argument) for argument in arguments])
    if code:
        raise RuntimeError(f"draftquant {arguments[0]} ended with {code}: {said.getvalue()}")
