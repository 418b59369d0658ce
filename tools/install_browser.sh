#!/usr/bin/env bash
# Installs Chromium and its driver for the tests of the status page: by apt-get, as root, where they
# are missing. Where that cannot be it says why, and those tests skip; it never fails a run.
set -uo pipefail

LIMIT_S=${LIMIT_S:-600}

say() { printf 'browser: %s\n' "$*"; }

has_all() { command -v chromium >/dev/null && command -v chromedriver >/dev/null; }

if has_all; then
  say "$(chromedriver --version 2>/dev/null) is here"
elif [ "$EUID" != 0 ]; then
  say 'chromium and chromedriver are not here and this is not root: the tests of the status page skip'
elif ! command -v apt-get >/dev/null; then
  say 'chromium and chromedriver are not here and there is no apt-get: the tests of the status page skip'
else
  say 'installing chromium and chromium-driver with apt-get'
  export DEBIAN_FRONTEND=noninteractive
  log=$(mktemp)
  if timeout "$LIMIT_S" apt-get update >"$log" 2>&1 &&
    timeout "$LIMIT_S" apt-get install -y --no-install-recommends chromium chromium-driver >>"$log" 2>&1 &&
    has_all; then
    say "installed $(chromedriver --version 2>/dev/null)"
  else
    say 'the installation failed, the tests of the status page skip; the end of its log:'
    tail -n 5 "$log"
  fi
  rm -f "$log"
fi
exit 0
