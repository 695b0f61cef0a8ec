# Sourced by scripts/test, scripts/release and .ci/run. Defines check_wheel, build_release and
# found_pythons; needs ROOT and VENV.

# check_wheel PYTHON...: what a user gets, built by way of the sdist, so that the wheel cannot need a
# file that only a checkout has; installed for each interpreter as Containerfile does, from a folder of
# wheels and no index, and used.
check_wheel() {
  local work python venv step
  work="$(mktemp -d)"
  trap "rm -rf '$work'" EXIT
  build_release "$ROOT" "$work/dist" >"$work/build.log" 2>&1 || { cat "$work/build.log" && return 1; }
  for python in "$@"; do
    venv="$(mktemp -d "$work/venv.XXXX")"
    "$python" -m pip download -qq -d "$venv/wheels" -c "$ROOT/constraints.txt" \
      "$work"/dist/*.whl || return 1
    step="$(install_step)"
    step="${step//\/opt\/draftquant/"$venv"}"
    step="${step//\/wheels/"$venv/wheels"}"
    EXTRAS= PIP_CONFIG_FILE=/dev/null bash -c "${step/python3/"$python"}" >"$work/install.log" ||
      { cat "$work/install.log" && return 1; }
    rm -r "$venv/wheels"
    mkdir "$venv/empty"
    (cd "$venv/empty" && OMP_NUM_THREADS=1 "$venv/bin/python" -I "$ROOT/tests/wheel_check.py") ||
      return 1
  done
}

# build_release SOURCE FOLDER: the sdist and, by way of it, the wheel. Of equal files they have equal
# bytes: what setuptools takes of the machine, times, owners and the umask, is written over.
build_release() {
  local sdist plain="$2/plain"
  export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-315532800}"
  (umask 022 && "$VENV/bin/python" -m build --outdir "$2" "$1") || return 1
  for sdist in "$2"/*.tar.gz; do
    mkdir "$plain" && tar -xzf "$sdist" -C "$plain" || return 1
    tar --sort=name --format=gnu --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
      --mode=u+rw,go=rX -cf - -C "$plain" "$(basename "$sdist" .tar.gz)" | gzip -9n >"$sdist"
    rm -r "$plain"
  done
}

# The command of Containerfile that installs draftquant, on one line.
install_step() {
  sed -e ':join' -e '/\\$/{N;s/\\\n *//;b join' -e '}' "$ROOT/Containerfile" |
    sed -n 's/^RUN \(python3 -m venv .*\)/\1/p'
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
