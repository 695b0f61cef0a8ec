"""What SGLang's own modules draft in a block, of DFlash2: `blocks.json`.

Usage, in the engines' environment: `python experiments/engines/blocks.py`. `test_dflash2.py` holds
replay against it.

The drafts are those of `drafts`, in float32, loaded by SGLang's loader into its own classes. What
is not SGLang's here: attention over the keys and values that its modules make (a kernel), and the
tables of the target. Of each block: the tokens that it proposes, and with DFlash2 the scores of the
candidates that they were chosen from.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
OUT = HERE / "blocks.json"
sys.path.insert(0, str(HERE.parents[1] / "tests"))  # tiny_dflash.py

from tiny_dflash import tiny_dflash  # noqa: E402

NUM_CONTEXT, NUM_DRAFT_TOKENS, ANCHORS = 9, 5, (17, 3)
CASES: dict[str, dict[str, Any]] = {
    "dflash2": {"kind": "dflash2"},
    "dflash2-scaled": {
        "kind": "dflash2",
        "own": {"output_multiplier": 0.5, "final_logit_softcapping": 3.0, "selector_top_k": 4},
    },
}


def draft(folder: Path, case: str) -> Path:
    """The draft of a case, with an embedding and a head, which SGLang takes from the target."""
    asked = CASES[case]
    return tiny_dflash(
        folder,
        kind=asked["kind"],
        num_layers=2,
        embed=True,
        head=True,
        dtype="F32",
        own=asked.get("own"),
    )


def features() -> "np.ndarray[Any, np.dtype[np.float32]]":
    """[NUM_CONTEXT, 3 * hidden], what the draft reads of the target."""
    rng = np.random.default_rng(1)
    return rng.standard_normal((NUM_CONTEXT, 3 * 64), dtype=np.float32)


def drafted(case: str, folder: Path) -> dict[str, Any]:
    """Of every anchor the block behind it, as SGLang drafts it."""
    import sglang_loader
    import sglang_platform
    import torch
    from verdict import read_tensors

    sglang_platform.install("sm90")
    from sglang.srt.models import utils

    utils._is_cuda = False  # else queries and keys are normed by a kernel
    made = draft(folder / "draft", case)
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text('{"num_hidden_layers": 8}', encoding="utf-8")
    subject = sglang_loader.subject(made, folder / "target", 1, 0)
    model = subject.build().float()  # which SGLang would serve in float16
    subject.load_folder(model)
    for module in model.modules():
        if hasattr(module, "forward_native"):
            module.forward = module.forward_native
    model.set_block_size(1 + NUM_DRAFT_TOKENS)
    tensors = read_tensors(made)
    tables = {name: tensors[f"{name}.weight"] for name in ("embed_tokens", "lm_head")}
    with torch.no_grad():
        return {str(anchor): _block(model, tables, anchor) for anchor in ANCHORS}


def _block(model: Any, tables: dict[str, Any], anchor: int) -> dict[str, Any]:
    import torch

    mask = model.draft_config.mask_token_id
    ids = torch.tensor([anchor] + [mask] * NUM_DRAFT_TOKENS)
    positions = torch.arange(NUM_CONTEXT, NUM_CONTEXT + len(ids))
    rows = model.project_target_hidden(torch.from_numpy(features()))
    for layer in model.layers:
        attention = layer.self_attn
        k, v = attention.kv_proj_only(rows)
        k = attention.apply_k_rope(torch.arange(NUM_CONTEXT), attention.apply_k_norm(k))
        attention.attn.forward = _attend(attention, k, v)
    embedded = torch.nn.functional.embedding(ids, tables["embed_tokens"])
    hidden = model(ids, positions, None, input_embeds=embedded).hidden_states
    return _walk(model, tables, hidden[None], torch.tensor([anchor]))


def _attend(attention: Any, context_k: Any, context_v: Any) -> Any:
    """The kernel's part: every slot looks at the context and at every slot."""
    import torch

    def heads(x: Any) -> Any:
        return x.view(len(x), -1, attention.head_dim).transpose(0, 1)

    def attend(q: Any, k: Any, v: Any, _batch: Any) -> Any:
        keys, values = torch.cat((context_k, k)), torch.cat((context_v, v))
        groups = attention.num_heads // attention.num_kv_heads
        keys, values = (heads(x).repeat_interleave(groups, 0) for x in (keys, values))
        scores = heads(q) @ keys.mT * attention.scaling
        return (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)

    return attend


def _walk(model: Any, tables: dict[str, Any], hidden: Any, anchors: Any) -> dict[str, Any]:
    """`_selector_lattice` and `_SelectorDraftSampler` of `dflash_worker_v2.py`, one request."""
    import torch

    hidden, selector = hidden[:, 1:], model.candidate_selector
    unary, candidates = (hidden @ tables["lm_head"].T).topk(selector.top_k, dim=-1)
    scores = selector.build_lattice(
        candidate_ids=candidates,
        unary_logits=model._transform_unary_logits(unary.clone()),
        hidden_states=hidden,
        anchor_token_ids=anchors,
    )
    tokens, _ = selector.sample_path(
        candidate_ids=candidates,
        scores=scores,
        uniforms=torch.zeros(1, NUM_DRAFT_TOKENS),
        temperatures=torch.ones(1),
        greedy_mask=torch.ones(1, dtype=torch.bool),
    )
    found, before = [], 0  # the scores behind the candidate that was taken
    for slot, token in enumerate(tokens[0].tolist()):
        ids, row = candidates[0, slot].tolist(), scores[0, slot, before].tolist()
        found.append({str(i): round(score, 4) for i, score in zip(ids, row, strict=True)})
        before = ids.index(token)
    return {"tokens": tokens[0].tolist(), "scores": found}


def main() -> int:
    """Each case in a process of its own: SGLang keeps configs by path, and is set up once."""
    if len(sys.argv) > 1:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(drafted(sys.argv[1], Path(folder))))
        return 0
    import subprocess

    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    found = {}
    for case in CASES:
        command = [sys.executable, __file__, case]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[case] = json.loads(done.stdout.splitlines()[-1])
    rows = (f'"{case}": {json.dumps(blocks)}' for case, blocks in found.items())
    OUT.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
