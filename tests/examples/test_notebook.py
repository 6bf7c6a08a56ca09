# SPDX-License-Identifier: Apache-2.0
"""The notebook, run from its first cell to the last."""

import pathlib

import nbclient
import nbformat

NOTEBOOK = pathlib.Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def test_the_notebook_trains_on_two_ranks(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    found = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in found.cells)
    nbclient.NotebookClient(found, timeout=400, kernel_name="python3").execute()
    printed = [
        output.text
        for cell in found.cells
        for output in cell.get("outputs", ())
        if output.output_type == "stream"
    ]
    assert "rank 0 holds (5000, 16)" in "".join(printed)
    assert "rank 1 holds" not in "".join(printed)
