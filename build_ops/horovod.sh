#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds Horovod 0.28.1 for an installed TensorFlow, for engine="horovod".
# Usage: build_ops/horovod.sh PYTHON [PIP_OPTIONS...]
#   PYTHON       that of the environment with TensorFlow
#   PIP_OPTIONS  for pip install, as --target DIR
# Horovod's own variables choose what is built; without them it is Gloo on
# processors. HOROVOD_WITHOUT_MPI=0 leaves MPI to Horovod's own search and
# HOROVOD_GPU_OPERATIONS=NCCL adds NCCL; HOROVOD_WITHOUT_TENSORFLOW=1 installs
# nothing but its launcher, horovodrun.
set -euo pipefail
python=$1
shift
version=0.28.1

for program in cmake "${CXX:-g++}"; do
  if ! command -v "$program" >/dev/null; then
    echo "$program not found. Run: apt-get install cmake g++" >&2
    exit 1
  fi
done
if ! tensorflow=$("$python" -c \
  'import importlib.metadata as m; print(m.version("tensorflow"))'); then
  echo "Horovod is built for the TensorFlow of $python, which has none" >&2
  exit 1
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# Horovod imports these to run; its setup.py needs none of them but packaging.
"$python" -m pip install -q "$@" cloudpickle psutil pyyaml packaging cffi
"$python" -m pip download -q --no-deps --no-binary :all: \
  --no-build-isolation -d "$folder" "horovod==$version"
tar -xzf "$folder/horovod-$version.tar.gz" -C "$folder"
source=$folder/horovod-$version
export HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
if [ "${HOROVOD_WITHOUT_TENSORFLOW:-0}" = 1 ]; then
  export HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_GLOO=1
  "$python" -m pip install --no-build-isolation --no-deps "$@" "$source"
  echo "The launcher of Horovod $version is installed, without its library."
  exit
fi

# From TensorFlow 2.19 on its wheel lacks headers of XLA that this file needs.
# Without it Horovod's operations cannot be compiled by XLA; all others are
# there, and the strategy uses no other.
file=horovod/tensorflow/xla_mpi_ops.cc
before='#if TENSORFLOW_VERSION >= 2006000000'
after="$before \&\& TENSORFLOW_VERSION < 2019000000"
if [ "$(grep -cx "$before" "$source/$file")" != 1 ]; then
  echo "$file is not as in Horovod $version: \"$before\" is no line of it" >&2
  exit 1
fi
sed -i "s/^$before\$/$after/" "$source/$file"

export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1
if [ "${HOROVOD_WITHOUT_MPI:-1}" = 1 ]; then
  export HOROVOD_WITHOUT_MPI=1
else
  unset HOROVOD_WITHOUT_MPI
fi
export MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}" TF_CPP_MIN_LOG_LEVEL=3
"$python" -m pip install --no-build-isolation --no-deps "$@" "$source"
echo "Horovod $version for TensorFlow $tensorflow is installed. Changed in it:"
echo "  $file: $before"
echo "      is ${after//\\/}"
