"""The table of all commands: what each does, in groups as help shows them.

Help, completion, the page of all commands and the parser are made from it.
"""

from collections.abc import Mapping

GROUPS: Mapping[str, Mapping[str, str]] = {
    "look": {
        "recipes": "list the built-in recipes, show one, or check your own",
        "inspect": "what a draft is, and how many bytes quantization can save",
        "plan": "what a recipe would do to every tensor; nothing is written",
        "estimate": "does quantizing pay? bytes and time of a draft step, break-even",
        "check": "what vLLM, SGLang or TensorRT-LLM will do with a draft folder",
    },
    "make": {
        "quantize": "quantize a draft into a new folder, and verify it",
        "graft": "put a quantized MTP layer back into its target's folder",
        "vocab": "keep the head's rows that a target needs; acceptance by size",
    },
    "convert": {
        "transcode": "store the same quantized values in another layout or dtype",
        "dequantize": "turn a quantized draft into plain weights for any engine",
        "unpickle": "convert a draft's pickled weights (.bin, .pt) to safetensors",
    },
    "judge": {
        "record": "record a target's tokens and hidden states on prompts (traces)",
        "traces": "import, describe, split or merge recorded traces",
        "replay": "measure the acceptance length of drafts over recorded traces",
        "gate": "may the quantized draft replace the BF16 one?",
        "compare": "several drafts on the same prompts: which one for your traffic?",
        "parity": "does speculation, or a quantized draft, change the output?",
    },
    "serve": {
        "measure": "measure the acceptance and the speed of running servers",
        "golden": "simulate or monitor acceptance: engines, Prometheus, Grafana",
    },
    "ship": {
        "verify": "re-read a quantized draft with an independent decoder",
        "report": "turn the gate's report into a page, Markdown or JUnit test cases",
        "card": "write a quantized draft's README.md for the Hub",
    },
    "housekeeping": {
        "clean": "remove what killed runs left beside outputs",
        "completion": "print the completion script for your shell",
        "help": "show this list, or the help of a command: help parity draft",
    },
}
"""Heading -> command -> what it does."""
COMMANDS: Mapping[str, str] = {
    name: summary for group in GROUPS.values() for name, summary in group.items()
}


# ---- Command lines to copy: one or two for every command, shown below its `--help`

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "": (
        "draftquant recipes list",
        "draftquant quantize ./draft --recipe fp8-ptpc --out ./draft-fp8",
        "draftquant gate ./draft ./draft-fp8 --traces ./gate-traces",
    ),
    "recipes": (
        "draftquant recipes list --engine sglang --gpu mi325x",
        "draftquant recipes show mi325x > mine.yaml",
    ),
    "recipes list": ("draftquant recipes list --engine vllm --gpu b200 --family eagle3-llama",),
    "recipes show": ("draftquant recipes show mi325x-w4a8",),
    "recipes check": ("draftquant recipes check ./mine.yaml",),
    "inspect": ("draftquant inspect nvidia/Kimi-K2.5-Thinking-Eagle3",),
    "plan": ("draftquant plan ./draft --recipe fp8-ptpc",),
    "estimate": (
        "draftquant estimate ./draft --gpu mi325x --concurrency 8 --target-step-ms 14.2",
        "draftquant estimate ./draft --recipe fp8-ptpc --gpu b200 --context 8192 --tp 2",
    ),
    "quantize": (
        "draftquant quantize ./draft --recipe fp8-ptpc --out ./draft-fp8",
        "draftquant quantize ./draft --recipe int4-channel-gptq --traces ./calibration-traces"
        " --out ./draft-int4",
    ),
    "vocab": (
        "draftquant vocab ./draft --traces ./calibration-traces --curve --judge ./other-traces"
        " --gpu h200 --target-step-ms 14.2",
        "draftquant vocab ./draft --traces ./calibration-traces --size 32768 --out ./draft-32k",
    ),
    "graft": (
        "draftquant graft ./target-fp8 ./layer-int4 --out ./target-fp8-mtp",
        "draftquant graft ./target-fp8 ./target-bf16 --subtree model.layers.61"
        " --out ./target-fp8-mtp",
    ),
    "verify": ("draftquant verify ./draft-fp8 --against ./draft",),
    "dequantize": ("draftquant dequantize ./draft-fp8 --out ./draft-plain",),
    "unpickle": ("draftquant unpickle ./draft-bin --out ./draft",),
    "transcode": (
        "draftquant transcode ./draft-w4a8 --layout compressed-tensors --out ./draft-ct",
    ),
    "check": (
        "draftquant check ./draft-fp8 --engine sglang --gpu mi325x",
        "draftquant check ./draft-fp8 --engine vllm --tp 2",
    ),
    "clean": ("draftquant clean ./outputs --older-than 24",),
    "record": (
        "draftquant record --target ./target --draft ./draft --prompts prompts.jsonl"
        " --out ./gate-traces",
        "draftquant record --engine vllm --target ./target --draft ./draft --prompts prompts.jsonl"
        " --max-new-tokens 256 --out ./gate-traces",
    ),
    "traces": (
        "draftquant traces info ./gate-traces",
        "draftquant traces split ./traces --fraction 0.3 --out ./calibration-traces ./gate-traces",
    ),
    "traces import": (
        "draftquant traces import ./dump --from specforge --target ./target --draft ./draft"
        " --out ./traces",
    ),
    "traces info": ("draftquant traces info ./gate-traces",),
    "traces split": (
        "draftquant traces split ./traces --fraction 0.3 --out ./calibration-traces ./gate-traces",
    ),
    "traces merge": ("draftquant traces merge ./traces-a ./traces-b --out ./traces",),
    "traces store": ("draftquant traces store ./traces --feature-storage zstd --out ./packed",),
    "replay": ("draftquant replay ./draft ./draft-fp8 --traces ./gate-traces -k 3",),
    "measure": (
        "draftquant measure --server http://127.0.0.1:8000 --engine vllm --prompts prompts.jsonl"
        " --tokenizer ./target --out bf16.jsonl",
        "draftquant measure --show bf16.jsonl",
    ),
    "golden": (
        "draftquant golden golden.json --for vllm --category code",
        "draftquant golden golden.json --for prometheus --engine vllm --out rules.yml",
    ),
    "gate": (
        "draftquant gate ./draft ./draft-fp8 --traces ./gate-traces --report gate.json",
        "draftquant gate --measured bf16.jsonl fp8.jsonl",
    ),
    "report": ("draftquant report gate.json --html gate.html",),
    "compare": ("draftquant compare ./draft ./draft-fp8 ./draft-int4 --traces ./gate-traces",),
    "card": ("draftquant card ./draft-fp8 --gate gate.json",),
    "parity": ("draftquant parity draft ./draft ./draft-fp8 --traces ./gate-traces",),
    "parity divergence": ("draftquant parity divergence plain.jsonl bf16.jsonl fp8.jsonl",),
    "parity tasks": ("draftquant parity tasks ./scores-bf16 ./scores-fp8",),
    "parity run-tasks": (
        "draftquant parity run-tasks --server http://127.0.0.1:8000 --engine vllm --model target"
        " --tokenizer ./target --tasks gsm8k --out ./scores-bf16",
    ),
    "parity sampled": (
        "draftquant parity sampled plain.jsonl fp8.jsonl --prompts prompts.jsonl --target ./target",
    ),
    "parity draft": ("draftquant parity draft ./draft ./draft-fp8 --traces ./gate-traces",),
    "help": ("draftquant help gate", "draftquant help parity draft"),
    "completion": (
        "draftquant completion bash > ~/.local/share/bash-completion/completions/draftquant",
        "draftquant completion zsh > ~/.zfunc/_draftquant",
    ),
}
"""Command, verbs with it -> command lines; "" = of `draftquant` itself."""
