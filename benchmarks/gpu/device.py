# SPDX-License-Identifier: Apache-2.0
"""The kernels' library, and memory of the device with guards around it."""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

GUARD_BYTES = 256
POISON = 0xA5  # of outputs before a kernel, and of what lies behind arrays

POINTER, INT64 = ctypes.c_void_p, ctypes.c_int64


class LookupBlock(ctypes.Structure):
    """GpuLookupBlock of lookup_functor_gpu.h."""

    _fields_ = (
        ("table", POINTER),
        ("bfloat16", ctypes.c_bool),
        ("table_rows", INT64),
        ("width", INT64),
        ("first_segment", INT64),
        ("out", POINTER),
    )


class Lookup(ctypes.Structure):
    """GpuLookup of lookup_functor_gpu.h."""

    _fields_ = (
        ("blocks", POINTER),
        ("block_count", INT64),
        ("widest", INT64),
        ("segments", INT64),
        ("row_splits", POINTER),
        ("rows", POINTER),
        ("weights", POINTER),
        ("combiner", ctypes.c_int),
    )


class GradBlock(ctypes.Structure):
    """GpuGradBlock of lookup_grad_functor_gpu.h."""

    _fields_ = (
        ("table", INT64),
        ("first_sample", INT64),
        ("first_value", INT64),
    )


class GradTable(ctypes.Structure):
    """GpuGradTable of lookup_grad_functor_gpu.h."""

    _fields_ = (
        ("first_key", INT64),
        ("rows", INT64),
        ("width", INT64),
        ("row_grads", POINTER),
    )


class RowGrads(ctypes.Structure):
    """GpuRowGrads of lookup_grad_functor_gpu.h."""

    _fields_ = (
        ("grad", POINTER),
        ("blocks", POINTER),
        ("block_count", INT64),
        ("tables", POINTER),
        ("table_count", INT64),
        ("keys", INT64),
        ("widest", INT64),
        ("quads", ctypes.c_bool),
        ("samples", INT64),
        ("row_splits", POINTER),
        ("rows", POINTER),
        ("weights", POINTER),
        ("entries", INT64),
        ("unique_rows", POINTER),
        ("first_unique", POINTER),
    )


class DecodeIds(ctypes.Structure):
    """GpuDecodeIds of decode_ids_functor_gpu.h, its parts one by one."""

    _fields_ = (
        ("payload", POINTER),
        ("sections", POINTER),
        ("blocks", POINTER),
        ("block_count", INT64),
        ("row_splits", POINTER),
        ("rows", POINTER),
        ("weights", POINTER),
        ("status", POINTER),
    )


class CombineBlock(ctypes.Structure):
    """GpuCombineBlock of combine_functor_gpu.h."""

    _fields_ = (
        ("first_segment", INT64),
        ("width", INT64),
        ("dim", INT64),
        ("out", POINTER),
    )


class Combine(ctypes.Structure):
    """GpuCombine of combine_functor_gpu.h."""

    _fields_ = (
        ("blocks", POINTER),
        ("block_count", INT64),
        ("widest", INT64),
        ("segments", INT64),
        ("row_splits", POINTER),
        ("firsts", POINTER),
        ("parts", POINTER),
    )


class CombineSection(ctypes.Structure):
    """GpuCombineSection of combine_functor_gpu.h."""

    _fields_ = (
        ("first_entry", INT64),
        ("first_value", INT64),
        ("width", INT64),
        ("dim", INT64),
        ("grad", POINTER),
    )


class CombineGrad(ctypes.Structure):
    """GpuCombineGrad of combine_functor_gpu.h."""

    _fields_ = (
        ("sections", POINTER),
        ("section_count", INT64),
        ("widest", INT64),
        ("entries", INT64),
        ("sample_ids", POINTER),
        ("scale", ctypes.c_float),
        ("values", POINTER),
    )


class Rows(ctypes.Structure):
    """GpuRows of row_update_functor_gpu.h, its parts one after the other."""

    _fields_ = (
        ("rows", POINTER),
        ("grads", POINTER),
        ("size", INT64),
        ("dim", INT64),
        ("table", POINTER),
        ("slots", POINTER * 3),
        ("bfloat16_table", POINTER),
        ("stochastic", ctypes.c_bool),
        ("seed", ctypes.c_uint64),
        ("num_rows", INT64),
        ("bad_row", POINTER),
    )


class Block(ctypes.Structure):
    """Block of initial_values.h."""

    _fields_ = tuple(
        (name, INT64)
        for name in (
            "rows",
            "row_part",
            "row_parts",
            "local_rows",
            "first_column",
            "local_dim",
        )
    )


class Values(ctypes.Structure):
    """InitialValues of initial_values.h."""

    _fields_ = (
        ("distribution", ctypes.c_int),
        ("a", ctypes.c_float),
        ("b", ctypes.c_float),
    )


class DeviceError(Exception):
    """An error of CUDA, or memory written that was not a kernel's to write."""


class Array:
    """An array in the device's memory, with a guard behind it."""

    def __init__(self, device: Device, values: np.ndarray) -> None:
        self.dtype, self.shape = values.dtype, values.shape
        self._device = device
        self._bytes = values.nbytes
        pointer = ctypes.c_void_p()
        guard = device.guard_bytes
        device.call("Allocate", INT64(self._bytes + guard), pointer)
        self.pointer = pointer.value
        device.arrays.append(self)
        whole = np.full(self._bytes + guard, POISON, np.uint8)
        whole[: self._bytes] = np.frombuffer(
            np.ascontiguousarray(values).tobytes(), np.uint8
        )
        if whole.size:
            device.call(
                "Copy", POINTER(self.pointer), _at(whole), INT64(whole.size)
            )

    def get(self) -> np.ndarray:
        """Copies it to the host and looks at its guard."""
        whole = np.empty(self._bytes + self._device.guard_bytes, np.uint8)
        if whole.size:
            self._device.call(
                "Copy", _at(whole), POINTER(self.pointer), INT64(whole.size)
            )
        if (whole[self._bytes :] != POISON).any():
            raise DeviceError("a kernel wrote behind the end of an array")
        return whole[: self._bytes].view(self.dtype).reshape(self.shape)


class Device:
    """A library of the kernels and what is allocated through it.

    Args:
        library: what `build.py` has made.
        guards: whether arrays have a guard. AddressSanitizer has its own,
            directly behind them.
    """

    def __init__(self, library: pathlib.Path, guards: bool = True) -> None:
        self.library: Any = ctypes.CDLL(str(library))
        self.guard_bytes = GUARD_BYTES if guards else 0
        self.arrays: list[Array] = []
        self.library.ErrorText.restype = ctypes.c_char_p
        self.library.InitialValue.restype = ctypes.c_float
        for name in (
            *("RowGradsScratch", "IdOfRow", "IdBlockBytes", "IdSectionBytes"),
            *("WriteIdSection", "PlaceIdSection"),
        ):
            getattr(self.library, name).restype = INT64

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function that returns an error of CUDA."""
        passed = [
            ctypes.byref(a)
            if isinstance(a, ctypes.Structure)
            or (isinstance(a, ctypes.c_void_p) and name == "Allocate")
            else a
            for a in arguments
        ]
        error = getattr(self.library, name)(*passed)
        if error:
            text = self.library.ErrorText(error).decode()
            raise DeviceError(f"{name}: CUDA error {error}: {text}")

    def count(self) -> int:
        """Counts the GPUs; an error of CUDA says that there is none."""
        count = ctypes.c_int(0)
        error = self.library.DeviceCount(ctypes.byref(count))
        return 0 if error else count.value

    def put(self, values: np.ndarray) -> Array:
        return Array(self, values)

    def put_structures(self, structures: Sequence[ctypes.Structure]) -> Array:
        """Copies a table of C structures."""
        together = b"".join(bytes(each) for each in structures)
        return Array(self, np.frombuffer(together, np.uint8))

    def poisoned(self, shape: tuple[int, ...], dtype: type) -> Array:
        """An output that nothing has been written to."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        poison = np.full(size, POISON, np.uint8)
        return Array(self, poison.view(dtype).reshape(shape))

    def synchronize(self) -> None:
        self.call("Synchronize")

    def release(self) -> None:
        """Frees all arrays, after a last look at their guards."""
        try:
            if self.guard_bytes:
                for array in self.arrays:
                    array.get()
        finally:
            for array in self.arrays:
                self.call("Free", POINTER(array.pointer))
            self.arrays.clear()


def _at(values: np.ndarray) -> ctypes.c_void_p:
    return POINTER(values.ctypes.data)
