# SPDX-License-Identifier: Apache-2.0
"""Loads a SavedModel without this package, in three ways, and predicts.

python served_program.py FOLDER
"""

import ctypes
import glob
import pathlib
import runpy
import sys

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

FOLDER = pathlib.Path(sys.argv[1])
SERVED = str(FOLDER / "served")
MAPPED = str(FOLDER / "mapped")
GROWN = str(FOLDER / "grown")
DELTA = str(FOLDER / "delta")


class Output(ctypes.Structure):
    """A tensor of a graph: `TF_Output`."""

    _fields_ = (("operation", ctypes.c_void_p), ("index", ctypes.c_int))


def python_loader(ids, path=SERVED):
    served = tf.saved_model.load(path)
    predict = served.signatures["serving_default"]
    (name,) = predict.structured_input_signature[1]
    (found,) = predict(**{name: tf.constant(ids)}).values()
    return found.numpy()


def python_updated(ids):
    """Keys that came after the model was loaded."""
    served = tf.saved_model.load(GROWN)
    served.apply_delta(DELTA)
    return served.serve(ids).numpy()


def session_updated(ids):
    """The same as servers do it, which run signatures in a session."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        graph = tf.compat.v1.saved_model.load(session, ["serve"], GROWN)

        def run(name, value):
            signature = graph.signature_def[name]
            (given,) = signature.inputs.values()
            outputs = {k: v.name for k, v in signature.outputs.items()}
            return session.run(outputs, {given.name: value})

        assert run("apply_delta", DELTA)["number"] == 1
        return run("serving_default", ids)["output_0"]


def c_library():
    """TensorFlow's C API, with a class for what it points to."""
    folder = tf.sysconfig.get_lib()
    (library,) = glob.glob(f"{folder}/libtensorflow_cc.so.2")
    c = ctypes.CDLL(library)
    for name in (
        *("NewStatus", "NewGraph", "NewSessionOptions", "TensorData"),
        *("LoadSessionFromSavedModel", "GraphOperationByName"),
        *("AllocateTensor", "Message"),
    ):
        getattr(c, f"TF_{name}").restype = ctypes.c_void_p
    return c, ctypes.c_void_p


def c_loader(ids, path=SERVED):
    c, pointer = c_library()
    status, graph = pointer(c.TF_NewStatus()), pointer(c.TF_NewGraph())

    def check():
        assert c.TF_GetCode(status) == 0, ctypes.string_at(c.TF_Message(status))

    session = pointer(
        c.TF_LoadSessionFromSavedModel(
            pointer(c.TF_NewSessionOptions()),
            None,
            path.encode(),
            (ctypes.c_char_p * 1)(b"serve"),
            1,
            graph,
            None,
            status,
        )
    )
    check()
    described = saved_model_pb2.SavedModel.FromString(
        pathlib.Path(path, "saved_model.pb").read_bytes()
    )
    signature = described.meta_graphs[0].signature_def["serving_default"]

    def place(tensors):
        (tensor,) = tensors.values()
        name, index = tensor.name.split(":")
        found = c.TF_GraphOperationByName(graph, name.encode())
        return Output(found, int(index))

    ids = np.ascontiguousarray(ids, np.int64)
    shape = (ctypes.c_int64 * ids.ndim)(*ids.shape)
    fed = pointer(
        c.TF_AllocateTensor(9, shape, ids.ndim, ctypes.c_size_t(ids.nbytes))
    )
    ctypes.memmove(c.TF_TensorData(fed), ids.ctypes.data, ids.nbytes)
    fetched = pointer()
    c.TF_SessionRun(
        session,
        None,
        ctypes.byref(place(signature.inputs)),
        ctypes.byref(fed),
        1,
        ctypes.byref(place(signature.outputs)),
        ctypes.byref(fetched),
        1,
        None,
        0,
        None,
        status,
    )
    check()
    found = ctypes.string_at(c.TF_TensorData(fetched), 4 * len(ids))
    return np.frombuffer(found, np.float32).reshape(-1, 1)


def command_line(ids):
    np.save(FOLDER / "ids.npy", ids)
    sys.argv = [
        *("saved_model_cli", "run", "--dir", SERVED, "--tag_set", "serve"),
        *("--signature_def", "serving_default", "--overwrite"),
        *("--inputs", f"ids={FOLDER / 'ids.npy'}", "--outdir", str(FOLDER)),
    ]
    try:
        runpy.run_module(
            "tensorflow.python.tools.saved_model_cli", run_name="__main__"
        )
    except SystemExit as end:
        assert not end.code, end
    return np.load(FOLDER / "output_0.npy")


def main():
    given = np.load(FOLDER / "expected.npz")
    for predict, *path in (
        (python_loader,),
        (python_loader, MAPPED),
        (c_loader,),
        (c_loader, MAPPED),
        (python_loader, GROWN),
        (c_loader, GROWN),
        (command_line,),
        (python_updated,),
        (session_updated,),
    ):
        found = predict(given["ids"], *path)
        expected = "grown" if GROWN in path else "expected"
        if predict.__name__.endswith("updated"):
            expected = "grown_on"
        np.testing.assert_allclose(
            found,
            given[expected],
            rtol=1e-6,
            err_msg=f"{predict.__name__} {path}",
        )
    assert "tfdist_ext" not in sys.modules


if __name__ == "__main__":
    main()
