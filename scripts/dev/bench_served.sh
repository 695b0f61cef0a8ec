#!/usr/bin/env bash
# The whole validation of the five drafts of our mission where they are served: on one machine of
# 8 GPUs (8 x 141 GB or more: Kimi-K2.5 and K2.6 have 595 GB of weights), with vLLM and with SGLang.
#
#   PROMPTS=gate.jsonl CALIBRATION=calibration.jsonl ./scripts/dev/bench_served.sh [OPTION...] [DRAFT...]
#
#   --engine vllm|sglang   only with this one (default: both)
#   --dry-run              print every command, run none
#   --list                 print the names of the drafts
#
# DRAFT: names as --list prints them; all of them by default. For each draft and engine, in order:
# repair its config, record traces, quantize, verify, check, gate on traces, measure speed (servers
# are launched, ended, and take turns), measure outputs, gate on what was served, parity, reconcile.
# What a step has written is not made again: a run that was cut short goes on with the same command.
# A gate or a check that says no is told at the end and stops nothing; an error stops the draft.
#
# Exit status: 0 all PASS, 1 something says no, 2 an error, 3 something is INCONCLUSIVE.
#
# Environment:
#   PROMPTS, CALIBRATION  JSON lines with token_ids, and no prompt in both. Four of PROMPTS for each
#                         request in flight: 160 for 40. Kimi's tokenizer is remote code, which
#                         draftquant never runs: docs/servers.md has a recipe that makes both files.
#   OUT                   folder for all of it (default ./served); 1.5 TB with the targets
#   TARGETS, DRAFTS       folders with the models, fetched where they are missing
#   VLLM, SGLANG          python of each engine (default python3). draftquant is in vLLM's
#                         environment too: pip install --no-deps and this clone, or a wheel of it
#   ARCH, TP              GPUs as `check --arch` says them (default sm90: H100, H200; sm100: B200;
#                         gfx942: MI325X), how many (default 8)
#   CONCURRENCIES, REPEATS, MAX_NEW_TOKENS, PORT   default "1, 2, 8, 40", 3, 512, 8000
#   RECIPE                instead of the recipe of each draft and engine
#   VLLM_ARGUMENTS, SGLANG_ARGUMENTS   more arguments of every server
set -euo pipefail

# Paths stand in links and in matrices, which mean the same wherever they are read.
absolute() { [[ -z "$1" || "$1" == /* ]] && printf '%s' "$1" || printf '%s' "$PWD/$1"; }

OUT="$(absolute "${OUT:-served}")"
TARGETS="$(absolute "${TARGETS:-$OUT/targets}")"
DRAFTS="$(absolute "${DRAFTS:-$OUT/drafts}")"
PROMPTS="$(absolute "${PROMPTS:-}")"
CALIBRATION="$(absolute "${CALIBRATION:-}")"
VLLM="${VLLM:-python3}"
SGLANG="${SGLANG:-python3}"
ARCH="${ARCH:-sm90}"
TP="${TP:-8}"
CONCURRENCIES="${CONCURRENCIES:-1, 2, 8, 40}"
REPEATS="${REPEATS:-3}"
MAX_NEW_TOKENS="${MAX_NEW_TOKENS:-512}"
PORT="${PORT:-8000}"

# name | draft | target | decoder layers of the target | family | K
ROWS="\
kimi-k2.5-eagle3|lightseekorg/kimi-k2.5-eagle3|moonshotai/Kimi-K2.5|61|eagle3-llama|3
kimi-k2.5-eagle3-mla|lightseekorg/kimi-k2.5-eagle3-mla|moonshotai/Kimi-K2.5|61|eagle3-mla|3
kimi-k2.6-eagle3-mla|k-l-lambda/kimi-k2.6-eagle3-mla|moonshotai/Kimi-K2.6|61|eagle3-mla|3
kimi-k2.6-eagle3-nvidia|nvidia/Kimi-K2.6-Eagle3|moonshotai/Kimi-K2.6|61|eagle3-mla|3
kimi-linear-dflash|Moonlight556/Kimi-Linear-48B-A3B-DFlash-240k|moonshotai/Kimi-Linear-48B-A3B-Instruct|27|dflash|15"

engines=(vllm sglang)
dry_run=0
chosen=()
worst=0
summary=()

main() {
  parse_arguments "$@"
  local name engine status line
  for name in "${chosen[@]}"; do
    for engine in "${engines[@]}"; do
      if [[ "$engine $(field "$name" 5)" == "sglang dflash" ]]; then
        # SGLang 0.5.23: kimi_linear.py has set_dspark_layers_to_capture alone, and
        # attention_backend_setup.py:62 refuses a target that cannot capture for DFLASH.
        summary+=("$name on sglang: SKIPPED, SGLang 0.5.23 captures no layers of Kimi-Linear")
        continue
      fi
      # In a subshell, whose first error ends it and not the other drafts; beside `||` it would go on.
      set +e
      (set -e && validate "$name" "$engine")
      status=$?
      set -e
      collect "$name" "$engine" "$status"
    done
  done
  step "Summary"
  ((dry_run)) && say "# (nothing was run)"
  for line in "${summary[@]}"; do say "# $line"; done
  exit "$worst"
}

parse_arguments() {
  local names only=()
  names="$(cut -d '|' -f 1 <<<"$ROWS")"
  while (($#)); do
    case "$1" in
      --dry-run) dry_run=1 ;;
      --list) echo "$names" && exit ;;
      --engine)
        [[ "${2:-}" == vllm || "${2:-}" == sglang ]] || fail "--engine: expected vllm or sglang"
        only+=("$2") && shift
        ;;
      -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" && exit ;;
      -*) fail "$1: no such option (see --help)" ;;
      *)
        grep -qxF -- "$1" <<<"$names" || fail "$1: no such draft; use one of: ${names//$'\n'/, }"
        chosen+=("$1")
        ;;
    esac
    shift
  done
  ((${#only[@]})) && engines=("${only[@]}")
  ((${#chosen[@]})) || mapfile -t chosen <<<"$names"
  check_prompts
}

# What would be met hours later: no prompts, too few of them, text instead of tokens, or the same.
check_prompts() {
  local name file most needed count
  most="$(tr -cs '0-9' '\n' <<<"$CONCURRENCIES" | sort -n | tail -n 1)"
  for name in PROMPTS CALIBRATION; do
    file="${!name}"
    [[ -n "$file" ]] || fail "set $name to a file of prompts with token_ids: docs/servers.md has a recipe"
    [[ -f "$file" ]] || fail "$name: no file $file"
    count="$(grep -c '[^[:space:]]' "$file" || true)"
    [[ "$(tokens_of "$file" | wc -l)" == "$count" ]] ||
      fail "$name: expected token_ids in each of the $count lines of $file"
    needed=1
    [[ "$name" == PROMPTS ]] && needed=$((4 * ${most:-1}))
    ((count >= needed)) || fail "$name: expected at least $needed prompts, $file has $count"
  done
  count="$(comm -12 <(tokens_of "$PROMPTS" | sort -u) <(tokens_of "$CALIBRATION" | sort -u) | wc -l)"
  ((count == 0)) || fail "PROMPTS and CALIBRATION: expected other prompts, $count are in both"
}

# The token_ids of each line of a file of prompts.
tokens_of() { sed -n 's/.*"token_ids": *\(\[[^]]*\]\).*/\1/p' "$1" | tr -d ' '; }

# One draft on one engine: the steps in order.
validate() {
  local name="$1" engine="$2"
  local repository target layers family k recipe
  repository="$(field "$name" 2)" target="$(field "$name" 3)" layers="$(field "$name" 4)"
  family="$(field "$name" 5)" k="$(field "$name" 6)"
  recipe="${RECIPE:-$(recipe_of "$engine" "$family")}"
  local target_folder="$TARGETS/${target#*/}" draft="$DRAFTS/$name" traces="$OUT/traces/$name"
  local folder="$OUT/$name.$engine"
  local bf16="$folder/bf16" quantized="$folder/$recipe"
  statuses="$folder/statuses"
  folders "$OUT/traces" "$TARGETS" "$DRAFTS" "$folder"

  step "$name on $engine, $recipe: fetch the draft (a minute) and the target (an hour at 10 Gbit/s)"
  fetched "$draft" "$repository"
  fetched "$target_folder" "$target"

  step "what the draft is, and a copy that the engine reads as it was trained (1 minute)"
  run draftquant inspect "$draft"
  made "$bf16" || judge "BF16 check" draftquant check "$draft" --engine "$engine" --arch "$ARCH" \
    --tp "$TP" --target-layers "$layers" --fix --out "$bf16"
  made "$bf16" || run ln -sfn "$draft" "$bf16" # nothing was to be repaired

  # Both engines share it, and the drafts of a target have its tables and their own features.
  step "what the target does, recorded by vLLM (30 minutes, of which 15 load the target)"
  local recording=(--engine vllm --target "$target_folder" --draft "$draft" --fused --tables
    --max-new-tokens "$MAX_NEW_TOKENS" --engine-arg "tensor_parallel_size=$TP"
    --engine-arg trust_remote_code=true --engine-arg max_model_len=8192
    --engine-arg language_model_only=true)
  local record=("$VLLM" -m draftquant.scripts.cli record "${recording[@]}")
  made "$traces.gate" || run "${record[@]}" --prompts "$PROMPTS" --out "$traces.gate"
  made "$traces.calibration" || run "${record[@]}" --prompts "$CALIBRATION" \
    --out "$traces.calibration"

  step "quantize (1 minute; by GPTQ 10 to 30), verify every byte, see that it loads (1 minute)"
  made "$quantized" || run draftquant quantize "$bf16" --recipe "$recipe" -k "$k" \
    --traces "$traces.calibration" --out "$quantized"
  judge verify draftquant verify "$quantized" --against "$bf16"
  judge check draftquant check "$quantized" --engine "$engine" --arch "$ARCH" --tp "$TP" \
    --target-layers "$layers"

  step "the gate on traces, and parity of proposals (5 minutes on one GPU)"
  judge "gate on traces" draftquant gate "$bf16" "$quantized" --traces "$traces.gate" -k "$k" \
    --report "$folder/gate-traces.json"
  judge "parity of proposals" draftquant parity draft "$bf16" "$quantized" \
    --traces "$traces.gate" -k "$k" --report "$folder/parity-draft.json"

  step "speed ($REPEATS repeats of 3 starts of 10 to 15 minutes and an hour of requests: 5 hours)"
  local servers=("$engine" "$family" "$target_folder" "$bf16" "$quantized" "$k")
  write_matrix "$folder/speed.yaml" "${servers[@]}" 0 "$CONCURRENCIES" "$REPEATS"
  made "$folder/speed.svg" || run draftquant measure --launch "$folder/speed.yaml" \
    --out "$folder/speed" --plot "$folder/speed.svg"

  step "outputs with the two most likely tokens, and the undrafted and BF16 servers again (1 hour)"
  write_matrix "$folder/outputs.yaml" "${servers[@]}" 2 "8, 16" 2
  run draftquant measure --launch "$folder/outputs.yaml" --out "$folder/outputs"

  step "parity of outputs, the gate on what was served, and served against replayed (1 minute)"
  local outputs="$folder/outputs/measurements"
  judge "parity of outputs" draftquant parity divergence "$outputs/none.c8.r1.jsonl" \
    "$outputs/bf16.c8.r1.jsonl" "$outputs/quantized.c8.r1.jsonl" \
    --plain-again "$outputs/none.c16.r2.jsonl" --report "$folder/parity-divergence.json"
  judge "gate on servers" draftquant gate --measured "$outputs/bf16.c8.r1.jsonl" \
    "$outputs/quantized.c8.r1.jsonl" --baseline-again "$outputs/bf16.c8.r2.jsonl" \
    --parity "$folder/parity-divergence.json" --report "$folder/gate-measured.json"
  judge reconcile draftquant reconcile "$traces.gate" "$outputs/quantized.c8.r1.jsonl" \
    --draft "$quantized" --report "$folder/reconcile.json"
}

# What loads on the engine (recipes/README.md, loads_on): SGLang has no INT4 for an MLA draft.
recipe_of() {
  case "$1 $2" in
    "sglang eagle3-mla") echo fp8-ptpc ;;
    *) echo int4-channel-gptq ;;
  esac
}

# The servers. Flags were looked up in vLLM 0.33.0 (engine/arg_utils.py:975 trust-remote-code, 991
# max-model-len, 1209 tensor-parallel-size, 1389 gpu-memory-utilization, 1402 enable-prefix-caching,
# 1497 language-model-only, 1694 per-request-spec-decode-metrics, 1754 max-num-seqs, 1866
# speculative-config; config/speculative.py:69 methods) and SGLang 0.5.23 (srt/arg_groups/fields:
# model.py:51 and 106, parallel.py:45, schedule.py:27 and 31, memory.py:64, spec.py:31 to 70, 216).
# Prompts are asked for again and again: no engine may remember them (prefix caching, radix cache).
matrix() {
  local engine="$1" family="$2" target="$3" bf16="$4" quantized="$5" k="$6" top="$7"
  local concurrencies="$8" repeats="$9" command of_bf16 of_quantized drafted environment="{}"
  if [[ "$engine" == vllm ]]; then
    local method="${family%%-*}" # eagle3 or dflash, as vLLM calls them
    environment='{VLLM_SERVER_DEV_MODE: "1"}' # it tells which draft it runs, and how it accepts
    command="$VLLM -m vllm.entrypoints.cli.main serve {target} --host {host} --port {port}
    --tensor-parallel-size $TP --trust-remote-code --language-model-only
    --gpu-memory-utilization 0.9 --max-model-len 8192 --max-num-seqs 64
    --no-enable-prefix-caching${VLLM_ARGUMENTS:+
    $VLLM_ARGUMENTS}"
    drafted="--per-request-spec-decode-metrics detailed --speculative-config
      '{\"method\": \"$method\", \"model\": \"{draft}\", \"num_speculative_tokens\": $k}'"
    of_bf16="$drafted" of_quantized="$drafted"
  else
    command="$SGLANG -m sglang.launch_server --model-path {target} --host {host} --port {port}
    --tp-size $TP --trust-remote-code --mem-fraction-static 0.85 --context-length 8192
    --max-running-requests 64 --disable-radix-cache --enable-metrics${SGLANG_ARGUMENTS:+
    $SGLANG_ARGUMENTS}"
    drafted="--speculative-algorithm EAGLE3 --speculative-draft-model-path {draft}
      --speculative-num-steps $k --speculative-eagle-topk 1
      --speculative-num-draft-tokens $((k + 1))"
    # A draft without a declaration of its own inherits --quantization (serving_hook.py:689).
    of_bf16="$drafted --speculative-draft-model-quantization unquant" of_quantized="$drafted"
  fi
  cat <<MATRIX
schema_version: 1
engine: $engine
target: $target
prompts: $PROMPTS
max_new_tokens: $MAX_NEW_TOKENS
num_top_logprobs: $top
concurrencies: [$concurrencies]
repeats: $repeats
port: $PORT
start_seconds: 3600
environment: $environment
command: >-
    $command
variants:
  - name: none
  - name: bf16
    draft: $bf16
    arguments: >-
      $of_bf16
  - name: quantized
    draft: $quantized
    arguments: >-
      $of_quantized
MATRIX
}

field() { grep -- "^$1|" <<<"$ROWS" | cut -d '|' -f "$2"; }

say() { printf '%s\n' "$*"; }
step() { say "" && say "# $*"; }
fail() { echo "error: $*" >&2 && exit 2; }

# Whether a step has written its output already.
made() { ((!dry_run)) && [[ -e "$1" ]]; }

# A model of the Hub: it gets its name when all of it is there, and goes on where it was cut off.
fetched() {
  made "$1" && return
  run hf download "$2" --local-dir "$1.part"
  run mv "$1.part" "$1"
}

folders() { ((dry_run)) || mkdir -p "$@"; }

# Print a command as it may be pasted, and run it.
run() {
  quoted "$@"
  ((dry_run)) || "$@"
}

quoted() {
  local words
  printf -v words '%q ' "$@"
  say "${words% }"
}

# The same for a command that judges: 1 and 3 are verdicts, noted once and for all in $statuses.
judge() {
  local what="$1" status=0
  shift
  if ((!dry_run)) && grep -qs -- "^[013] $what\$" "$statuses"; then return; fi
  quoted "$@"
  ((dry_run)) && return
  "$@" || status=$?
  if [[ "$status" != [013] ]]; then return "$status"; fi
  say "$status $what" >>"$statuses"
}

# A matrix file: FILE, and the arguments of `matrix`. One that is there was made of the same.
write_matrix() {
  local file="$1" text
  shift
  text="$(matrix "$@")"
  if ((dry_run)); then
    say "cat >$(printf '%q' "$file") <<'MATRIX'" && say "$text" && say MATRIX
  elif [[ ! -e "$file" ]]; then
    say "$text" >"$file"
  elif [[ "$text" != "$(<"$file")" ]]; then
    fail "$file was made with other settings: give them again, or another OUT"
  fi
}

# What became of a draft on an engine, for the summary and the exit status.
collect() {
  local name="$1" engine="$2" status="$3" line words=(PASS "says NO" "" INCONCLUSIVE)
  ((dry_run)) && return
  while read -r code what; do
    line+="; $what: ${words[$code]}"
    worse "$code"
  done < <(cat "$OUT/$name.$engine/statuses" 2>/dev/null)
  if [[ "$status" != 0 ]]; then
    line+="; STOPPED by an error ($status)"
    worse 2
  fi
  summary+=("$name on $engine: ${line#; }")
}

# Errors are worse than a no, which is worse than not knowing.
worse() {
  local order=" 0 3 1 2 "
  local before="${order%% "$worst" *}" after="${order%% "$1" *}"
  if ((${#after} > ${#before})); then worst="$1"; fi
}

main "$@"
