# SPDX-License-Identifier: Apache-2.0
"""A rank of two whose peer is a pair of bare sockets, for the test to write."""

import socket
import struct

import tensorflow as tf

from tfdist_ext.comm.connection import Connection
from tfdist_ext.comm.process_group import ProcessGroup
from tfdist_ext.ops import collective_ops

# Header of custom_ops/comm/wire.h.
HEADER = struct.Struct("<IHHqQQqIIiiQQd72s40s")
# ControlFrame, and its types.
FRAME = struct.Struct("<IIiiQ1000s")
PING, PONG, ABORT, GOODBYE, LEAVE, INSERT, INSERTED, VALUE = range(2, 10)
MAGIC, ALL_GATHER, ALL_REDUCE, FLOAT = 0x74664435, 2, 3, 1
NUMBERS = 5
# Dimensions of [5], as `HashShape` mixes them.
SHAPE = (1 * 0x9E3779B97F4A7C15 + NUMBERS) % (1 << 64)
FIELDS = (
    *("magic", "kind", "flags", "tag", "call", "bytes", "rows"),
    *("generation", "part", "dtype", "root", "agreed", "shape", "weight"),
    *("label", "shapes"),
)


def good_header(tag):
    return {
        "magic": MAGIC,
        "kind": ALL_REDUCE,
        "flags": 0,
        "tag": tag,
        "call": 0,
        "bytes": 4 * NUMBERS,
        "rows": 0,
        "generation": 0,
        "part": 0,
        "dtype": FLOAT,
        "root": 0,
        "agreed": 4 * NUMBERS,
        "shape": SHAPE,
        "weight": 1.0,
        "label": b"sum",
        "shapes": b"[5]",
    }


def gather_header(tag):
    """A header of `Rank.gather`, with 5 rows."""
    changed = {"kind": ALL_GATHER, "rows": NUMBERS, "agreed": 4, "shape": 1}
    return good_header(tag) | changed | {"shapes": b"rows of []"}


def pack(header):
    return HEADER.pack(*(header[name] for name in FIELDS))


def frame(kind, *, code=0, nonce=0, text=b""):
    return FRAME.pack(MAGIC, kind, 1, code, nonce, text)


def read_frames(connection):
    """Yields (type, code, nonce, text) until the connection ends."""
    with connection.makefile("rb") as file:
        while len(data := file.read(FRAME.size)) == FRAME.size:
            _, kind, _, code, nonce, text = FRAME.unpack(data)
            yield kind, code, nonce, text.rstrip(b"\0")


class Rank:
    def __init__(self, timeout=20.0, most_early=0):
        ours, self.peer = zip(
            socket.socketpair(), socket.socketpair(), strict=True
        )
        self.group = ProcessGroup(
            0,
            2,
            ["a:1", "b:1"],
            lambda: [None, Connection(*ours)],
            timeout,
            most_early=most_early,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for end in self.peer:
            end.close()
        self.group.close()

    def sum(self, tag=2):
        x = tf.range(NUMBERS, dtype=tf.float32)
        (total,) = collective_ops.all_reduce(
            self.group, [x], tag=tag, label="sum"
        )
        return total.numpy()

    def gather(self, tag=2):
        """Returns a tensor, also in a graph."""
        x = tf.range(NUMBERS, dtype=tf.float32)
        rows, _ = collective_ops.all_gather(self.group, x, tag=tag, label="sum")
        return rows
