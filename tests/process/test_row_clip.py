# SPDX-License-Identifier: Apache-2.0
"""CowClip counts the samples of the whole batch, at any number of ranks."""

import numpy as np
import pytest
import row_clip_cases

pytestmark = pytest.mark.process

SOME = ("row_wise", "column_wise", "data_parallel", "two calls")


@pytest.mark.parametrize(
    ("ranks", "keras", "kind"),
    [
        (ranks, keras, kind)
        for ranks, keras, some in (
            (1, 3, SOME),
            (1, 2, SOME),
            (2, 3, row_clip_cases.KINDS),
            (2, 2, (*SOME, "large", "column_wise, unique rows")),
            (3, 3, (*SOME, "row_wise, unique rows")),
        )
        for kind in some
    ],
)
def test_tables_are_those_of_numpy(run_scenario, ranks, keras, kind):
    options = {"strategy": False} if ranks == 1 else {}
    for before, found in run_scenario(
        "row_clip_cases.train", kind, ranks=ranks, keras=keras, **options
    ):
        expected, clipped = row_clip_cases.by_numpy(kind, before)
        for share in np.mean(clipped, axis=0):
            assert 0.1 < share < 0.9, share
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
