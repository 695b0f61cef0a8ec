# Sourced by scripts/test and scripts/demo. Defines ROOT, VENV and setup_venv.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

# setup_venv EXTRA...: make .venv hold draftquant (editable) with these extras of pyproject.toml.
# A stamp per extra holds the hash of what it was installed from, so a second call costs nothing;
# without extras (stamp "none") any of them will do.
setup_venv() {
  local python extras hash extra missing=0
  hash="$(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | sha256sum | cut -d ' ' -f 1)"
  for extra in "$@"; do
    [[ "$(cat "$VENV/.installed-$extra" 2>/dev/null)" == "$hash" ]] || missing=1
  done
  if (($# == 0)) && ! cat "$VENV"/.installed-* 2>/dev/null | grep -qx "$hash"; then
    missing=1
  fi
  if ((missing)); then
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
      python="$(find_python)"
      "$python" -m venv "$VENV"
    fi
    extras="$(IFS=, && echo "$*")"
    echo "Setting up .venv with draftquant${extras:+[$extras]} (a few minutes the first time)" >&2
    "$VENV/bin/python" -m pip install -qq -c "$ROOT/constraints.txt" -e "$ROOT${extras:+[$extras]}"
    for extra in "${@:-none}"; do
      echo "$hash" >"$VENV/.installed-$extra"
    done
  fi
}

# The interpreter to build the venv with: $PYTHON, else python3.11, else python3.
find_python() {
  local python="${PYTHON:-}"
  if [[ -z "$python" ]]; then
    python="$(command -v python3.11 || command -v python3 || true)"
  fi
  if ! "${python:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "draftquant needs Python 3.11 or newer; '${python:-python3}' is not one." >&2
    echo "  fix: install it, or name it: PYTHON=/path/to/python3.11 $0" >&2
    return 1
  fi
  echo "$python"
}
