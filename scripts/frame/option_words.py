"""What an option that a verb does not have was meant to be: by its meaning, then by its spelling.

People know options by the words of other verbs, of engines, of quantizers and of trainers.
"""

import difflib
from collections.abc import Sequence

_WORDS = """
target target-model target-model-path base-model base verifier model model-path;
draft drafts model model-path draft-model draft-model-path speculative-model checkpoint path
  folder source original input bf16;
quant quantized candidate model model-path checkpoint path folder input;
bf16 baseline base original source reference draft;
traces trace trace-dir calibration calib calib-data calibration-data data dataset prompts;
dump input data dataset path; folder path dir directory; g.json report gate golden file input;
gpu gpus arch archs architecture hardware accelerator device sm gfx compute-capability;
recipe recipes scheme quant quantization quantize quant-cfg qformat preset config format gpu arch;
layout to format as export-format convert-to target-format output-format recipe scheme;
out output output-dir output-path output-folder save save-dir save-path save-to dest destination
  export export-path o;
report out output json save result results json-out;
num-draft-tokens num-speculative-tokens num-spec-tokens spec-tokens speculative-num-draft-tokens
  speculative-num-steps draft-tokens num-drafts gamma k depth;
prompts prompt dataset data input input-file questions jsonl traces;
against source original reference baseline base bf16 unquantized draft;
engine framework runtime backend serving for; backend toolkit quantizer;
server url base-url host address endpoint api api-base port;
server-url score-server server url base-url;
max-new-tokens max-tokens num-tokens new-tokens osl output-len output-length max-output-len
  length;
num-prompts num-samples samples max-samples calib-size num-calib-samples limit n count;
min-prompts min-samples num-prompts; count num-prompts num-samples n number;
tp tensor-parallel tensor-parallel-size tp-size num-gpus world-size;
overwrite force yes exist-ok replace;
concurrency max-concurrency workers num-workers parallel jobs threads max-num-seqs batch-size
  batch;
batch-size batch bs max-batch-size concurrency; confidence alpha level significance;
max-relative-drop max-drop threshold tolerance max-loss margin max-regression drop limit epsilon;
policy strictness mode;
head-online draft-lm-head-quantization lm-head-quantization quantize-head head;
kv-cache kv-cache-dtype kv-cache-scales kv-dtype kv cache-dtype kv-quant;
algorithm method rounding gptq awq;
size vocab-size rows draft-vocab-size vocabulary-size vocab num-rows;
aux-layers layers layer-ids capture-layers eagle-aux-hidden-state-layer-ids
  aux-hidden-state-layers;
target-layers num-layers layers num-hidden-layers target-num-layers; fix-config fix repair;
device cuda cpu gpu; dtype precision torch-dtype;
context context-length max-model-len seq-len sequence-length isl input-len ctx;
target-step-ms step-ms verify-ms latency itl tpot; measured measurements measurement served;
markdown md summary; category categories domain group; from format kind type trainer;
for format kind type engine; model model-name served-model served-model-name;
subtree prefix module layer; older-than age hours; fraction share ratio split;
expect-baseline baseline expected baseline-length expected-length;
unrecorded foreign external other-tool; foreign unrecorded external other-tool;
family kind architecture; gate report; timeout wait max-time
"""
"""Words of one meaning, up to a semicolon: first an option of ours, then what people say."""
_MEANINGS = [words.split() for words in _WORDS.split(";")]
_EVERYWHERE = {"max", "min", "num", "no", "of", "the", "is", "use", "with"}


def meant(name: str, options: Sequence[str], places: Sequence[str] = ()) -> str | None:
    """Which option or argument, without dashes, a name means, or is spelled like; None = none."""
    name = name.lower().replace("_", "-")
    said = [words[0] for words in _MEANINGS if name in words]
    by_meaning = [one for known in (places, options) for one in said if one in known]
    close = difflib.get_close_matches(name, (*places, *options), n=1)
    return next(iter((*by_meaning, *close)), None) or _shared(name, options)


def _shared(name: str, known: Sequence[str]) -> str | None:
    """The option with most words of the name: `--step-time-ms` is like `--target-step-ms`."""
    words = set(name.split("-")) - _EVERYWHERE
    most = max(known, key=lambda one: len(words & set(one.split("-"))), default="")
    return most if words & set(most.split("-")) else None
