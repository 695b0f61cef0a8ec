# Sourced by scripts/test and .ci/run. Defines check_wheel and found_pythons; needs ROOT and VENV.

# check_wheel PYTHON...: what a user gets, built by way of the sdist, so that the wheel cannot need a
# file that only a checkout has; installed for each interpreter, and used.
check_wheel() {
  local work python venv
  work="$(mktemp -d)"
  trap "rm -rf '$work'" EXIT
  "$VENV/bin/python" -m build --outdir "$work/dist" "$ROOT" >"$work/build.log" 2>&1 ||
    { cat "$work/build.log" && return 1; }
  for python in "$@"; do
    venv="$(mktemp -d "$work/venv.XXXX")"
    "$python" -m venv "$venv" || return 1
    "$venv/bin/python" -m pip install -qq -c "$ROOT/constraints.txt" "$work"/dist/*.whl || return 1
    mkdir "$venv/empty"
    (cd "$venv/empty" && OMP_NUM_THREADS=1 "$venv/bin/python" -I "$ROOT/tests/wheel_check.py") ||
      return 1
  done
}

# The interpreters of the supported versions that this machine has, one a line.
found_pythons() {
  local version found
  for version in 3.11 3.12 3.13; do
    for found in "$(command -v "python$version")" \
      "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
      if [[ -x "$found" ]] && "$found" -c "import venv" 2>/dev/null; then
        echo "$found"
        break
      fi
    done
  done
}
