# SPDX-License-Identifier: Apache-2.0
"""How a process group learns of GPUs, as ops of CUDA builds.

`tfdist_ext.collectives.gpus` is how to use them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.ops.library import library


@dataclasses.dataclass(frozen=True)
class Offer:
    """What a rank brings to an exchange between GPUs.

    Attributes:
        bus: where its GPU is plugged in, empty if it cannot be used.
        version: of NCCL's library, empty without one.
        id: 128 bytes that name a new communicator, if asked for.
        reason: why there is no GPU, or no library.
        memory: bytes that the GPU has.
    """

    bus: str
    version: str
    id: bytes
    reason: str
    memory: int


def built_for_gpus() -> bool:
    """Whether the library has these ops: the same on all ranks of a job."""
    return hasattr(library(), "tfdist_gpu_offer")


def gpu_offer(device: int, files: Sequence[str], make_id: bool) -> Offer:
    """Looks at this rank's GPU and for NCCL's library.

    Args:
        device: CUDA's number of the GPU.
        files: where the library may be, in the order they are tried.
        make_id: whether this rank makes the id of a communicator.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        found = library().tfdist_gpu_offer(
            device=device, files=list(files), make_id=make_id
        )
    return Offer(
        found.bus.numpy().decode(),
        found.version.numpy().decode(),
        found.id.numpy(),
        found.reason.numpy().decode(errors="replace"),
        int(found.memory.numpy()),
    )


def group_gpus(
    handle: int, device: int, files: Sequence[str], name: bytes
) -> None:
    """Lets the collectives of a group run on this rank's GPU.

    Args:
        handle: of the group.
        device: CUDA's number of the GPU.
        files: see `gpu_offer`.
        name: id of the communicator, the same on all ranks; empty if
            exchanges go through the hosts.

    Raises:
        tf.errors.UnavailableError: CUDA or NCCL cannot be used.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        library().tfdist_group_gpus(
            group=tf.constant(handle, tf.int64),
            id=tf.constant(name),
            device=device,
            files=list(files),
        )
