"""What `verify` and `inspect` say of folders in which many things are wrong at once: every word."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import damages
import numpy as np
import pytest
import torch
from by_recipe import draft_of, quantized
from damages import PYTORCH, RECIPES, Tensors, audited, flipped, said, times
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.stored.stored_tables import StoredTables
from draftquant.recipes.errors import DraftQuantError
from tiny import Stored, edit_json, read_tensors, store, tiny_eagle3_llama, values_of, write_tensors
from told import check_told
from verify_cases import flip_bit

pytestmark = pytest.mark.usefixtures("one_thread")


def _attempt(do: Callable[[], object], folder: Path) -> str:
    try:
        return said(do(), folder)
    except (DraftQuantError, ValueError) as exc:
        return "! " + said(f"{exc}", folder)


def _with(change: Callable[[Tensors], object], tensors: Tensors) -> Tensors:
    changed = dict(tensors)
    change(changed)
    return changed


Q, CACHE_OF = "midlayer.self_attn.q_proj", "midlayer.self_attn.attn"


def _cache(dtype: str, *values: float, name: str = f"{CACHE_OF}.k_scale") -> dict[str, Stored]:
    return {name: store(np.array(values, np.float32), dtype)}


def _quantized_embedding(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("midlayer.mlp.down_proj.")]:
        tensors[f"embed_tokens.{name.rpartition('.')[2]}"] = tensors[name]
    del tensors["embed_tokens.weight"]


_INT4, _FP8, _OF_KEYS = "int4 with a cache", "fp8 of matrices", f"{CACHE_OF}.k_scale"
_TWICE = _cache("F32", 1.0, name="midlayer.self_attn.k_scale")
UNREADABLE: dict[str, tuple[str, Callable[[Tensors], object]]] = {
    "of no linear": (_INT4, lambda t: t.update({"norm.weight_scale": t["d2t"]})),
    "an embedding": (_INT4, _quantized_embedding),
    "a part": (_INT4, lambda t: t.pop(f"{Q}.weight_shape")),
    "another part": (_FP8, lambda t: damages.other_dtype(t, f"{Q}.weight_scale")),
    "a scale": (_INT4, lambda t: times(t, f"{Q}.weight_scale", 3, np.nan)),
    "an input": (_FP8, lambda t: times(t, f"{Q}.input_scale", 0, 0.0)),
    "an endless input": (_FP8, lambda t: times(t, f"{Q}.input_scale", 0, np.inf)),
    "zero points": ("two stages", lambda t: flipped(t, f"{Q}.weight_zero_point_2", 0, 1)),
    "other zero points": ("awq", lambda t: flipped(t, f"{Q}.qzeros", 0, 1)),
    "a code of NaN": (_FP8, lambda t: flipped(t, f"{Q}.weight", 0, 255 ^ t[f"{Q}.weight"].data[0])),
    "a cache twice": (_INT4, lambda t: t.update(_TWICE)),
    "a cache in I64": (_INT4, lambda t: t.update({_OF_KEYS: Stored("I64", (1,), bytes(8))})),
    **{
        f"a cache of {values}": (_INT4, lambda t, values=values: t.update(_cache("F32", *values)))
        for values in ((1.0, 2.0, 3.0), (1.0, 2.0), (1e-38,), (2.0**-126,), (0.0,), (np.inf,))
    },
}  # fmt: skip
"""What cannot be loaded: the recipe, and what happens to its tensors."""


def refused(folder: Path) -> dict[str, Any]:
    """What is said where a folder is loaded, and where a target's tables are looked for."""
    sizes = {"hidden": 128, "intermediate": 256, "heads": 2, "kv_heads": 2, "head_dim": 64}
    draft = tiny_eagle3_llama(folder / "draft", pruned_vocabulary=True, vocab=64, **sizes)
    made: dict[str, Path] = {}
    found: dict[str, Any] = {}
    for name, (recipe, change) in UNREADABLE.items():
        if recipe not in made:
            made[recipe] = quantized(draft, RECIPES[recipe], folder / recipe.replace(" ", "-")).out
            (made[recipe] / "draftquant.json").unlink()
        sound = read_tensors(made[recipe])
        write_tensors(made[recipe], _with(change, sound), metadata=PYTORCH)

        def load(out: Path = made[recipe]) -> object:
            loaded = load_draft(out)
            return sorted(loaded.quantized), loaded.cache_scales, set(loaded.activations.values())

        found[name] = [_attempt(load, folder), audited(folder, made[recipe]).get("faults")]
        write_tensors(made[recipe], sound, metadata=PYTORCH)
    for base in (0.5, 1.0, 1.5, float("inf")):
        found[f"rope {base}"] = _attempt(
            lambda base=base: load_draft(draft, rope_theta=base).geometry.rope.theta, folder
        )
    return found | {"tables": tables(folder, draft)}


def tables(folder: Path, draft: Path) -> dict[str, str]:
    """A target's embedding and head, and a draft that stores none."""
    own = read_tensors(draft)
    lent = {n: t for n, t in own.items() if n not in ("embed_tokens.weight", "lm_head.weight")}
    embedding, head = own["embed_tokens.weight"], own["lm_head.weight"]
    target, found = folder / "target", dict[str, str]()
    shutil.copytree(draft, target)
    edit_json(target / "config.json", architectures=["LlamaForCausalLM"], vocab_size=64)
    names = {"model.embed_tokens.weight": embedding, "model.lm_head.weight": embedding}
    turned = embedding._replace(shape=embedding.shape[::-1])
    cases: dict[str, Tensors] = {
        "sound": names,
        "no embedding": {"model.lm_head.weight": embedding},
        "no head": {"model.embed_tokens.weight": embedding, "model.layers.0.lm_head.weight": head},
        "several": {**names, "other.embed_tokens.weight": embedding},
        "of another shape": {**names, "model.lm_head.weight": turned},
        "of codes": {**names, "model.lm_head.weight": embedding._replace(dtype="I16")},
    }
    for name, tensors in cases.items():
        write_tensors(target, tensors, metadata=PYTORCH)
        found[name] = _attempt(lambda: StoredTables.find(target).lm_head.name, folder)
    found["absent"] = _attempt(lambda: StoredTables.find(folder / "absent"), folder)
    edit_json(target / "config.json", tie_word_embeddings=True)
    write_tensors(target, {"embed_tokens.weight": embedding}, metadata=PYTORCH)
    found["tied"] = _attempt(lambda: StoredTables.find(target).lm_head.name, folder)
    other = {"embed_tokens.weight": flip_bit(embedding, 8 * 1000)}
    for name, stored in (("alike", own), ("a bit", own | other), ("a shape", own)):
        write_tensors(draft, stored, metadata=PYTORCH)
        checkpoint = draft_of(draft).checkpoint
        of = "lm_head.weight" if name == "a shape" else "embed_tokens.weight"
        compare = partial(StoredTables.find(target).difference, checkpoint, checkpoint.tensors[of])
        found[f"different: {name}"] = _attempt(partial(compare, of), folder)
    write_tensors(draft, lent, metadata=PYTORCH)
    values = {n: torch.from_numpy(values_of(own[n]).copy()) for n in own.keys() - lent.keys()}
    few = {name: value[:5] for name, value in values.items()}
    for name, shared in (("none", {}), ("few", few), ("all", values)):
        load = partial(load_draft, draft, shared=shared)
        found[f"lent: {name}"] = _attempt(lambda load=load: sorted(load().weights), folder)
    return found


FIRST = (4, 7, 8, 9, 0, 5, 3)
"""The damage with which each recipe's linears begin."""
SCENES: dict[str, Callable[[Path], dict[str, Any]]] = {
    **{
        name: partial(damages.scene, recipe=recipe, first=first)
        for first, (name, recipe) in zip(FIRST, RECIPES.items(), strict=True)
    },
    "cut": damages.cut_scene,
    "rewritten": damages.rewritten,
    "grafted": damages.grafted,
    "refused": refused,
}


@pytest.mark.parametrize("name", SCENES)
def test_what_is_said_of_a_scene(name: str, tmp_path: Path) -> None:
    check_told("damages", {name: SCENES[name](tmp_path.resolve())})
