#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds a wheel, and tries it where no source tree can help.
# Usage: build_ops/wheel.sh PYTHON BASE_PYTHON
#   PYTHON       that of the environment with TensorFlow and auditwheel
#   BASE_PYTHON  the one that makes the environment in which the wheel is tried
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1")
base_python=$2
root=$PWD
tensorflow=$("$python" -c \
  'import importlib.metadata as m; print(m.version("tensorflow"))')

rm -rf build/wheel && mkdir -p build/wheel dist
"$python" -m pip wheel -q --no-build-isolation --no-deps -w build/wheel .
# TensorFlow's library comes with TensorFlow: two copies in a process crash.
PATH="$(dirname "$python"):$PATH" "$python" -m auditwheel repair \
  --exclude 'libtensorflow*' -w dist build/wheel/*.whl
wheel=$(ls -t dist/*.whl | head -n 1)
"$python" -m auditwheel show "$wheel"

trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
"$base_python" -m venv "$trial/venv"
"$trial/venv/bin/python" -m pip install -q "$root/$wheel" \
  "tensorflow==$tensorflow" -c "requirements-tf${tensorflow%.*}.txt"
cp examples/quickstart.py "$trial/"
cd "$trial"
unset PYTHONPATH
# The source tree must not be what is tried.
venv/bin/python - <<'EOF'
import pathlib
import sys

import tfdist_ext

where = pathlib.Path(tfdist_ext.__file__).resolve()
assert where.is_relative_to(pathlib.Path(sys.prefix).resolve()), where
EOF
venv/bin/tfdist-run -n 2 quickstart.py
echo "$wheel: installed, and examples/quickstart.py trained with it on 2 ranks"
