# SPDX-License-Identifier: Apache-2.0
"""Published programs on several ranks find what they find in one process.

Each at one rank and at some more; with TFDIST_TEST_EVERY_SIZE=1 (`make
test-ports`) at 1, 2 and 4.
"""

import importlib.util
import os

import numpy as np
import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        importlib.util.find_spec("keras_rs") is None,
        reason="no keras_rs is installed; it needs Python 3.11",
    ),
]

# Ranks beside one, the Keras that a program is written for, the program.
CASES = [
    (2, 2, "tfrs_ranking/basic_ranking"),
    (2, 2, "tfrs_ranking/dcn"),
    (2, 2, "tfrs_ranking/context_features"),
    (4, 2, "tfrs_ranking/listwise_ranking"),
    (2, 2, "tfrs_ranking/efficient_serving"),
    (2, 3, "keras_rs_ranking/basic_ranking"),
    (4, 3, "keras_rs_ranking/listwise_ranking"),
    (2, 3, "keras_rs_ranking/dlrm_dcn_v2"),
    (2, 3, "keras_rs_ranking/sas_rec"),
    (2, 3, "keras_io/behaviour_sequence_transformer"),
    (2, 3, "keras_io/collaborative_filtering"),
    (2, 3, "keras_io/wide_and_deep"),
]
# Those of retrieval, which `comparing.OneProcess` checks; "options" is ours.
OF_RETRIEVAL = [
    (2, 2, "basic"),
    (2, 2, "multitask"),
    (2, 2, "sequential"),
    (2, 2, "options"),
    (4, 3, "basic"),
    (2, 3, "sequential"),
]


def at_sizes(cases):
    """The cases, or each at every size."""
    if os.environ.get("TFDIST_TEST_EVERY_SIZE", "0") == "0":
        return cases
    return [(ranks, *case) for _, *case in cases for ranks in (2, 4)]


@pytest.fixture(scope="module")
def one_process_of(pools, tmp_path_factory):
    """What a program finds, and its port on one rank; each once."""
    known = {}

    def of(keras, case):
        if (keras, case) not in known:
            (known[keras, case],) = pools.run(
                "port_cases.in_one_process",
                *(case, tmp_path_factory.mktemp("one_process")),
                ranks=1,
                keras=keras,
                strategy=False,
            )
        return known[keras, case]

    return of


@pytest.mark.parametrize(("ranks", "keras", "case"), at_sizes(CASES))
def test_ports_find_what_is_published(
    pools, one_process_of, tmp_path, ranks, keras, case
):
    expected, alone = one_process_of(keras, case)
    several = pools.run(
        "port_cases.ported", case, tmp_path, ranks=ranks, keras=keras
    )
    for found in (alone, *several):
        assert set(found) == set(expected)
        for name, value in expected.items():
            # Of metrics that count to a few, and of losses alike.
            scale = max(np.abs(value).max(), 0.1)
            np.testing.assert_allclose(
                found[name], value, 0, 1e-5 * scale, err_msg=name
            )


@pytest.mark.parametrize(("ranks", "keras", "case"), at_sizes(OF_RETRIEVAL))
def test_retrieval_trains_as_published(one_process, ranks, keras, case):
    one_process.check("retrieval_cases", case, ranks, keras)
