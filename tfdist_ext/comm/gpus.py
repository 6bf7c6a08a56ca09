# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks' GPUs exchange by NCCL or through the hosts' memory."""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import json
import logging
import pathlib
from collections.abc import Mapping
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.comm.process_group import ProcessGroup
from tfdist_ext.ops import collective_ops
from tfdist_ext.ops import group_ops

# "0" disables NCCL; any other value is the path of its library.
NCCL_VARIABLE = "TFDIST_NCCL"
NO_GPU = "TensorFlow sees no GPU"
_SONAME = "libnccl.so.2"
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")
_TAG = 0  # of the first exchange
# Share of a GPU's memory for tables. The rest is for dense layers and temporary
# tensors.
_SHARE = 0.5

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class TableGpus:
    """Memory of the ranks' GPUs that tables may use.

    Attributes:
        memory: free bytes for weights and slots on the GPU of each rank; None
            if a rank has no such GPU.
        reason: why `memory` is None.
    """

    memory: float | None = None
    reason: str = ""

    def reserve(self, size: float) -> None:
        """Subtracts memory that tables use from now on."""
        if self.memory is not None:
            self.memory = max(self.memory - size, 0.0)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The GPU of a rank, as it is described to the other ranks.

    Attributes:
        place: identifier of the machine and of the GPU in it; empty if the rank
            has none.
        version: version of NCCL, empty without NCCL.
        reason: why the rank has no GPU or no NCCL.
        name: on rank 0, the communicator's id: 128 bytes in hexadecimal.
        memory: memory of the GPU in bytes.
    """

    place: str = ""
    version: str = ""
    reason: str = ""
    name: str = ""
    memory: int = 0


def connect(
    group: ProcessGroup, environ: Mapping[str, str], device: int | None
) -> tuple[str, TableGpus]:
    """Enables exchanges on GPUs, if this build supports them.

    All ranks call this before any other exchange. Rank 0 logs how GPUs
    exchange, and why.

    Args:
        group: the process group.
        environ: variables; see `NCCL_VARIABLE`.
        device: CUDA's number of this rank's GPU, None without a GPU.

    Returns:
        Why GPUs do not exchange by NCCL, empty if they do; and the memory that
        tables may use.

    Raises:
        tf.errors.UnavailableError: a rank does not answer.
    """
    if group.world_size == 1 or not group_ops.built_for_gpus():
        nothing = "there is nothing to exchange between GPUs"
        return nothing, TableGpus(reason="tfdist_ext is built without CUDA")
    files = libraries(environ)
    gpus = _exchange(group, _look(group.rank, files, device))
    reason = why_not_nccl(gpus)
    if group.rank == 0 and any(gpu.place for gpu in gpus):
        logger.info(
            "tfdist_ext: GPUs exchange %s",
            f"through the hosts' memory: {reason}" if reason else "by NCCL",
        )
    if device is not None and gpus[group.rank].place:
        name = b"" if reason else bytes.fromhex(gpus[0].name)
        group_ops.group_gpus(group.handle, device, files, name)
    return reason, for_tables(gpus)


def for_tables(gpus: Sequence[Gpu]) -> TableGpus:
    """Memory for tables: half of the GPU share of the rank with least.

    Args:
        gpus: GPUs by rank.
    """
    places = collections.Counter(gpu.place for gpu in gpus)
    least = float("inf")
    for rank, gpu in enumerate(gpus):
        if not gpu.place:
            return TableGpus(reason=f"rank {rank}: {gpu.reason}")
        least = min(least, _SHARE * gpu.memory / places[gpu.place])
    return TableGpus(memory=least)


def libraries(environ: Mapping[str, str]) -> list[str]:
    """Possible paths of NCCL's library: the loader's, or pip's.

    Args:
        environ: variables; see `NCCL_VARIABLE`.
    """
    chosen = environ.get(NCCL_VARIABLE, "")
    if chosen == "0":
        return []
    if chosen:
        return [chosen]
    files = [_SONAME]
    if (package := importlib.util.find_spec("nvidia")) is not None:
        for folder in package.submodule_search_locations or ():
            files.append(str(pathlib.Path(folder) / "nccl/lib" / _SONAME))
    return files


def why_not_nccl(gpus: Sequence[Gpu]) -> str:
    """Why these GPUs cannot exchange by NCCL; empty if they can.

    Args:
        gpus: GPUs by rank.
    """
    places: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if not gpu.place or not gpu.version:
            return f"rank {rank}: {gpu.reason}"
        if gpu.place in places:
            return f"ranks {places[gpu.place]} and {rank} share a GPU"
        if gpu.version != gpus[0].version:
            return (
                f"rank 0 has NCCL {gpus[0].version}, rank {rank} has "
                f"{gpu.version}"
            )
        places[gpu.place] = rank
    return ""


def visible_device() -> int | None:
    """CUDA's number of the GPU that this rank uses, None without a GPU."""
    gpus = tf.config.get_visible_devices("GPU")
    return int(gpus[0].name.rpartition(":")[2]) if gpus else None


def _look(rank: int, files: Sequence[str], device: int | None) -> Gpu:
    if device is None:
        return Gpu(reason=NO_GPU)
    offer = group_ops.gpu_offer(device, files, make_id=rank == 0)
    machine = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return Gpu(
        offer.bus and f"{machine}/{offer.bus}",
        offer.version,
        "" if offer.version else offer.reason or f"{NCCL_VARIABLE}=0",
        offer.id.hex(),
        offer.memory,
    )


def _exchange(group: ProcessGroup, gpu: Gpu) -> list[Gpu]:
    """Exchanges the descriptions of the ranks' GPUs; returns all by rank."""
    text = json.dumps(dataclasses.astuple(gpu)).encode()
    with tf.init_scope(), tf.device("CPU:0"):
        texts, lengths = collective_ops.all_gather(
            group, tf.io.decode_raw(text, tf.uint8), tag=_TAG, label="GPUs"
        )
        parts = tf.split(texts, lengths)
    return [Gpu(*json.loads(part.numpy().tobytes())) for part in parts]
