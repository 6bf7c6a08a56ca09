#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what pip cannot: a compiler and Python's venv. Usage:
#   build_ops/system_packages.sh PYTHON
# Without root or passwordless sudo it says what to install and ends with 1.
set -euo pipefail
python=$1

if ! command -v "$python" >/dev/null; then
  echo "$python not found. Install Python 3.10 to 3.13" \
    "(apt-get install python3), or name one: make PY=/path/to/python3" >&2
  exit 1
fi
supported='import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))'
if ! "$python" -c "$supported"; then
  echo "$("$python" --version) is not supported (3.10 to 3.13 are)." \
    "Name another one: make PY=/path/to/python3.12" >&2
  exit 1
fi

missing=()
command -v "${CXX:-g++}" >/dev/null || missing+=(g++)
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
[ ${#missing[@]} -eq 0 ] && exit 0

install=(apt-get install -y --no-install-recommends "${missing[@]}")
if ! command -v apt-get >/dev/null; then
  echo "Missing: ${missing[*]} (names of Debian packages). Install their" \
    "equivalents, then run make again." >&2
  exit 1
fi
if [ "$(id -u)" -eq 0 ]; then
  as_root=()
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
  as_root=(sudo -n)
else
  echo "System packages are missing and this user may not install them." \
    "Run, then make again:" >&2
  echo "  sudo ${install[*]}" >&2
  exit 1
fi
echo "Installing system packages: ${missing[*]}"
"${as_root[@]}" apt-get update -qq
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" "${install[@]}"
