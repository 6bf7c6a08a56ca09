# SPDX-License-Identifier: Apache-2.0
"""Published programs on several ranks find what they find in one process."""

import numpy as np
import pytest

pytestmark = pytest.mark.process

CASES = [
    (2, 2, "tfrs_ranking/basic_ranking"),
    (2, 2, "tfrs_ranking/dcn"),
    (2, 2, "tfrs_ranking/context_features"),
    (2, 2, "tfrs_ranking/listwise_ranking"),
    (2, 2, "tfrs_ranking/efficient_serving"),
    (2, 3, "keras_rs_ranking/basic_ranking"),
    (2, 3, "keras_rs_ranking/listwise_ranking"),
    (2, 3, "keras_rs_ranking/dlrm_dcn_v2"),
    (2, 3, "keras_rs_ranking/sas_rec"),
    (2, 3, "keras_io/behaviour_sequence_transformer"),
    (2, 3, "keras_io/collaborative_filtering"),
    (2, 3, "keras_io/wide_and_deep"),
]


@pytest.mark.parametrize(("ranks", "keras", "case"), CASES)
def test_ports_find_what_is_published(pools, tmp_path, ranks, keras, case):
    folders = [tmp_path / name for name in ("published", "ported")]
    for folder in folders:
        folder.mkdir()
    (expected,) = pools.run(
        "port_cases.published",
        *(case, folders[0]),
        ranks=1,
        keras=keras,
        strategy=False,
    )
    for found in pools.run(
        "port_cases.ported", case, folders[1], ranks=ranks, keras=keras
    ):
        assert set(found) == set(expected)
        for name, value in expected.items():
            # Of metrics that count to a few, and of losses alike.
            scale = max(np.abs(value).max(), 0.1)
            np.testing.assert_allclose(
                found[name], value, 0, 1e-5 * scale, err_msg=name
            )
