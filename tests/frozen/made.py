"""Folders that other programs write before a command reads them, by name.

Dumps of hidden states hold what the pair's target computes; scores are like those of lm_eval.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TARGET = Path("eagle3-llama/target")
LAYERS = (0, 1, 2)
DATE = "2026-11-22T12-01-02.345678"


def _states() -> list[dict[str, Any]]:
    """Three greedy texts of the target: tokens [N], outputs of layers and of the norm [N, W]."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16)
    kept: list[Any] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _module, _inputs, out: kept.append(out))
    texts = []
    for first in (3, 40, 77):
        tokens = torch.arange(first, first + 4)[None]
        with torch.inference_mode():
            for _ in range(12):
                tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
            kept.clear()
            normed = model.model(tokens).last_hidden_state[0]
        layers = [(out if torch.is_tensor(out) else out[0]).reshape(normed.shape) for out in kept]
        texts.append({"tokens": tokens[0], "layers": layers, "normed": normed})
    return texts


def vllm_dump(folder: Path) -> None:
    """As its ExampleHiddenStatesConnector writes them: the last layer's output in a slot more."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    lines = []
    for number, text in enumerate(_states()):
        stack = torch.stack([*(text["layers"][i] for i in LAYERS), text["layers"][-1]], dim=1)
        tensors = {"hidden_states": stack[:-1].clone(), "token_ids": text["tokens"][:-1].clone()}
        save_file(tensors, folder / f"cmpl-{number}-0.safetensors")
        prompt = {"id": f"p{number}", "category": "c", "token_ids": text["tokens"][:4].tolist()}
        lines.append(f"{json.dumps(prompt)}\n")
    folder.with_suffix(".jsonl").write_text("".join(lines), encoding="utf-8")


def specforge_dump(folder: Path) -> None:
    """As its preparation for EAGLE-3 writes them."""
    import torch

    rows = folder / "rows_0-2000"
    rows.mkdir(parents=True)
    for number, text in enumerate(_states()):
        mask = torch.ones_like(text["tokens"])
        mask[:4] = 0
        saved = {
            "input_ids": text["tokens"],
            "loss_mask": mask,
            "aux_hidden_state": torch.cat([text["layers"][i] for i in LAYERS], dim=-1)[None],
            "hidden_state": text["normed"][None],
        }
        torch.save(saved, rows / f"data_{number}.ckpt")


def scores(folder: Path) -> None:
    """Samples of lm_eval 0.4.13 of two servers: one answers four items of sixty otherwise."""
    for name, wrong in (("bf16", {5, 9}), ("int4", {5, 20, 33, 48})):
        samples = [
            {
                "doc_id": number,
                "doc": {"question": f"q{number}", "answer": "4"},
                "target": "4",
                "arguments": {"gen_args_0": {"arg_0": f"q{number}", "arg_1": {"until": ["\n"]}}},
                "resps": [["4"]],
                "filtered_resps": ["4"],
                "filter": "none",
                "metrics": ["exact_match"],
                "doc_hash": f"d{number}",
                "prompt_hash": f"p{number}",
                "target_hash": "t",
                "exact_match": float(number not in wrong),
            }
            for number in range(60)
        ]
        run = folder / name / "some__model"
        run.mkdir(parents=True)
        text = "".join(f"{json.dumps(sample)}\n" for sample in samples)
        (run / f"samples_gsm8k_{DATE}.jsonl").write_text(text, encoding="utf-8")
        (run / f"results_{DATE}.json").write_text(json.dumps({"of": name}), encoding="utf-8")


MADE: Mapping[str, Callable[[Path], None]] = {
    "vllm-dump": vllm_dump,
    "specforge-dump": specforge_dump,
    "scores": scores,
}
