"""Record what SpecForge's own `DSparkDraftModel` computes: dspark_maths.json.

Usage: `python dspark_maths.py FOLDER`, a checkout of github.com/sgl-project/SpecForge (a6b6b02).

Its files are imported from there; torch and transformers are those of the tests. The block is the
one of `dspark_case.py`, in float64; the anchor's slot proposes, as the trainer's labels are
(`dflash_family_model.py:764`). Kept are the first logits of every slot.
"""

import importlib
import json
import sys
import types
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen3Config

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "tests"))
from draftquant.quantize.drafts.families.dspark import MARKOV_HEADS  # noqa: E402
from dspark_case import CONFIG, CONTEXT, K, features, geometry_of, tokens, weights_of  # noqa: E402
from reference_draft import transformers_in_float64  # noqa: E402

KEPT = 24


def draft_class(specforge: Path) -> type[nn.Module]:
    """The class, without the imports of the package around it."""
    for name in ("specforge", "specforge.modeling", "specforge.modeling.draft"):
        package = types.ModuleType(name)
        package.__path__ = [str(specforge / name.replace(".", "/"))]
        sys.modules[name] = package
    found: type[nn.Module] = importlib.import_module(
        "specforge.modeling.draft.dspark"
    ).DSparkDraftModel
    return found


@torch.no_grad()
def logits_of(draft: type[nn.Module], kind: str) -> torch.Tensor:
    """[K, vocabulary] of the block, under teacher forcing."""
    geometry = geometry_of(markov_head_type=kind)
    weights = weights_of(geometry)
    config = Qwen3Config(
        **{key: CONFIG[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers",
                                        "num_attention_heads", "num_key_value_heads", "head_dim",
                                        "vocab_size", "rms_norm_eps")},
        rope_parameters={"rope_type": "default", "rope_theta": CONFIG["rope_theta"]},
        block_size=K,
        num_target_layers=8,
        dflash_config={
            "mask_token_id": CONFIG["mask_token_id"],
            "target_layer_ids": CONFIG["target_layer_ids"],
            "markov_rank": CONFIG["markov_rank"],
            "markov_head_type": kind,
        },
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = draft(config).double().eval()
    tables = ("embed_tokens.weight", "lm_head.weight")
    own = {name: t for name, t in weights.items() if name not in tables}
    own = {name: t for name, t in own.items() if not name.startswith("confidence_head.")}
    missing = model.load_state_dict(own, strict=False)
    assert not any(missing), missing
    block = tokens()
    slots = torch.tensor([block[:1] + [CONFIG["mask_token_id"]] * (K - 1)])
    hidden = model(
        position_ids=torch.arange(CONTEXT + K)[None],
        noise_embedding=weights["embed_tokens.weight"][slots],
        target_hidden=features(geometry),
    )
    found: torch.Tensor = model.apply_logits_head(
        hidden @ weights["lm_head.weight"].T,
        prev_token_ids=torch.tensor([block[:K]]),
        hidden_states=hidden,
    )
    return found[0]


def main() -> None:
    """Write the table."""
    torch.set_default_dtype(torch.float64)
    draft = draft_class(Path(sys.argv[1]))
    with transformers_in_float64():
        table = {kind: logits_of(draft, kind)[:, :KEPT].tolist() for kind in MARKOV_HEADS}
    lines = ",\n".join(f"{json.dumps(kind)}: {json.dumps(rows)}" for kind, rows in table.items())
    (HERE / "dspark_maths.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
