# SPDX-License-Identifier: Apache-2.0
"""The secret of a job comes from a variable or a file, or from nowhere."""

import pytest

from tfdist_ext.comm import handshake


def test_where_it_comes_from(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(b"  from a file\n")
    file.chmod(0o600)
    assert handshake.find_secret({}) == b""
    assert handshake.find_secret({"TFDIST_SECRET": "given"}) == b"given"
    assert (
        handshake.find_secret({"TFDIST_SECRET_FILE": f"{file}"})
        == b"from a file"
    )
    both = {"TFDIST_SECRET": "given", "TFDIST_SECRET_FILE": f"{file}"}
    assert handshake.find_secret(both) == b"given"


@pytest.mark.parametrize("contents", [None, b"", b" \n", b"x" * 5000])
def test_a_file_that_holds_none_is_refused(tmp_path, contents):
    file = tmp_path / "secret"
    if contents is not None:
        file.write_bytes(contents)
        file.chmod(0o600)
    with pytest.raises(ValueError, match="TFDIST_SECRET_FILE"):
        handshake.find_secret({"TFDIST_SECRET_FILE": f"{file}"})


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620])
def test_a_file_that_others_can_read_is_refused(tmp_path, mode):
    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef" * 4)
    file.chmod(mode)
    with pytest.raises(ValueError, match=f"mode {mode:04o}. Run: chmod 600"):
        handshake.find_secret({"TFDIST_SECRET_FILE": f"{file}"})
