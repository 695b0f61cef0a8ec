"""Several MTP modules through recording, replay and GPTQ.

The round that an engine serves is written out: rows are computed anew in every step, with the
draft's own tokens behind the last committed one, as `MultiModuleMTPSpeculator` of vLLM 0.33 does.
"""

import json
from pathlib import Path

import pytest
import tied_pair
import torch
from draftquant.calibration.passes.draft_inputs import first_hidden
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.scripts.cli import main
from draftquant.validate.counting.trace_replay import replay_drafts
from recorded import record_traces
from reference_draft import transformers_in_float64
from reference_mtp import ReferenceModules
from safetensors.torch import load_file, save_file
from tiny_mtp import tiny_step3p5_mtp
from torch import Tensor

K = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that is nearly a Markov chain, modules that are right now and then, and traces."""
    folder = tmp_path_factory.mktemp("modules")
    tied_pair.save_target(folder / "target")
    tied_modules(folder / "draft", folder / "target")
    prompts = [
        Prompt(id=f"p{i}", category="a", token_ids=tokens)
        for i, tokens in enumerate(tied_pair.prompt_tokens(6, 5))
    ]
    with transformers_in_float64():
        record_traces(
            folder / "target",
            prompts,
            folder / "traces",
            max_new_tokens=16,
            aux_layer_ids=[tied_pair.NUM_LAYERS - 1],
            dtype="float64",
        )
    return folder


def tied_modules(folder: Path, target: Path) -> None:
    """Three modules that say what follows the token they read, and a little of what is before."""
    tiny_step3p5_mtp(folder, number=tied_pair.NUM_LAYERS, window=2, dtype="F32")
    file = folder / "model.safetensors"
    tensors, theirs = load_file(file), load_file(target / "model.safetensors")
    hidden = tied_pair.HIDDEN
    for name, tensor in tensors.items():
        if name.endswith("eh_proj.weight"):
            tensors[name] = torch.cat((torch.eye(hidden), 0.4 * tensor[:, hidden:]), dim=1)
        elif name.endswith("shared_head.output.weight"):
            tensors[name] = theirs["lm_head.weight"].clone()
        elif name.endswith("o_proj.weight"):
            tensors[name] = 5.0 * tensor  # what the window hides is to show
        elif name.endswith("down_proj.weight"):
            tensors[name] = 0.4 * tensor
    tensors["model.embed_tokens.weight"] = theirs["model.embed_tokens.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def served_round(reference: ReferenceModules, states: Tensor, committed: Tensor) -> list[int]:
    """The K tokens drafted behind `committed`, whose last one has no state yet."""
    tokens, hidden, drafted = committed.tolist(), states[: len(committed) - 1], []
    for number in range(K):
        ids = torch.tensor([*tokens, *drafted])
        module = reference.modules[number]
        hidden = module._outputs(hidden, ids[number:])
        head = module._norm("norm", hidden)[-1] @ module.weights["lm_head.weight"].T
        drafted.append(int(head.argmax()))
    return drafted


def served_counts(draft: LoadedDraft, traces: TraceFolder, config: Path) -> tuple[int, int]:
    """Rounds and accepted tokens of a server that decodes the recorded continuations."""
    reference = ReferenceModules(
        "step3p5-mtp", json.loads(config.read_text(encoding="utf-8")), draft.weights
    )
    rounds = accepted = 0
    for trace in traces:
        states, at = first_hidden(draft, traces, trace), trace.prompt_length + 1
        while at + K <= trace.num_tokens:
            drafted = served_round(reference, states, trace.token_ids[:at])
            wanted = trace.token_ids[at : at + K].tolist()
            right = next((i for i in range(K) if drafted[i] != wanted[i]), K)
            rounds, accepted, at = rounds + 1, accepted + right, at + right + 1
    return rounds, accepted


@pytest.mark.usefixtures("float64_on_one_thread")
def test_replay_counts_what_a_server_accepts(folder: Path) -> None:
    draft = load_draft(folder / "draft", dtype=torch.float64)
    traces = TraceFolder.open(folder / "traces")
    (found,) = replay_drafts([draft], traces, num_draft_tokens=K)
    rounds, accepted = served_counts(draft, traces, folder / "draft/config.json")
    counts = [prompt.counts for prompt in found.prompts]
    assert sum(c.num_steps for c in counts) == rounds
    assert sum(c.num_accepted_draft_tokens for c in counts) == accepted
    assert 0.2 < accepted / rounds < K - 0.2  # neither all right nor all wrong


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_gptq_along_the_modules_and_more_draft_tokens_than_modules(
    folder: Path, tmp_path: Path
) -> None:
    out, traces = str(tmp_path / "out"), ["--traces", str(folder / "traces")]
    quantize = ["quantize", str(folder / "draft"), "--out", out, "--recipe", "int4-channel-gptq"]
    assert main([*quantize, *traces, "--num-draft-tokens", str(K)]) == 0
    assert main(["replay", str(folder / "draft"), out, *traces, "-k", "2"]) == 0
    assert main(["replay", str(folder / "draft"), *traces, "-k", "4"]) == 2
