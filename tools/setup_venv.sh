#!/usr/bin/env bash
# Makes .venv and installs Layline into it, once. Usage: tools/setup_venv.sh run|dev
#
# A stamp in the environment remembers what was installed (the hash of pyproject.toml and
# constraints.txt), so that the second call does nothing but compare it.
# PYTHON picks the interpreter; LAYLINE_TORCH_INDEX the package index for torch alone.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:-run}
venv=.venv
stamp="$venv/.layline-$kind"

die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  if [ -n "${PYTHON:-}" ]; then
    die "PYTHON=$PYTHON is not a Python from 3.11 to 3.13; give one, such as PYTHON=python3.11"
  fi
  die 'no Python from 3.11 to 3.13 found; on Debian 12: apt install python3 python3-venv'
}

make_venv() {
  local python
  python=$(find_python)
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python cannot make virtual environments; on Debian: apt install python3-venv"
  printf 'setup: making %s with %s\n' "$venv" "$("$python" --version)"
  "$python" -m venv --clear "$venv"
}

has_torch() { compgen -G "$venv/lib/python3*/site-packages/torch/version.py" >/dev/null; }

install_torch() {
  local pin
  pin=$(grep -E '^torch==' constraints.txt)
  if [ -n "${LAYLINE_TORCH_INDEX:-}" ]; then
    printf 'setup: installing %s from LAYLINE_TORCH_INDEX\n' "$pin"
    # Only torch comes from there; what it needs is resolved with everything else below.
    "$venv/bin/pip" install --disable-pip-version-check --no-deps --index-url "$LAYLINE_TORCH_INDEX" "$pin"
  elif [ ! -e /dev/nvidiactl ]; then
    "$venv/bin/python" tools/torch_size.py "${pin#torch==}"
  fi
}

main() {
  local extra
  case $kind in
    run) extra='[serve]' ;;
    dev) extra='[dev]' ;;
    *) die "kind '$kind' is not one of run, dev" ;;
  esac
  local want
  want=$(cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1)
  # An environment for development has all that running needs.
  if [ -x "$venv/bin/layline" ]; then
    local found
    for found in "$stamp" "$venv/.layline-dev"; do
      if [ -f "$found" ] && [ "$(cat "$found")" = "$want" ]; then return; fi
    done
  fi
  [ -x "$venv/bin/pip" ] || make_venv
  has_torch || install_torch
  printf 'setup: installing layline%s\n' "$extra"
  # A person wants to see the downloads move; a log only wants the errors.
  local verbosity=-qq
  if [ -t 1 ]; then verbosity=--progress-bar=on; fi
  "$venv/bin/pip" install "$verbosity" --disable-pip-version-check -c constraints.txt -e ".$extra"
  printf '%s\n' "$want" >"$stamp"
}

main
