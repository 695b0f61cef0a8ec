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
