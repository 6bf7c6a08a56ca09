# SPDX-License-Identifier: Apache-2.0
"""Which tests `make test` runs, and which only `make test-all` runs."""

import pathlib
from typing import Any

import pytest

TESTS = pathlib.Path(__file__).parent
# Folders whose tests start ranks, and the tier that each is in.
TIERS = {"process": "process", "numbers": "process", "fault": "fault"}
# Half a minute each: single tests, a notebook, and kernels that are compiled
# for a CPU.
SLOW = (
    "comm/test_gpu_exchange.py",
    "cuda_on_cpu/test_emulation.py",
    "cuda_on_cpu/test_gpu_decoding.py",
    "cuda_on_cpu/test_gpu_ops.py",
    "examples/test_notebook.py",
    "ops/test_large_tables.py",
    "optimizers/test_legacy_keras.py",
)

# Of the tests that start ranks, `make test` runs those at 2 ranks with Keras 3,
# and of the compared programs those with this in their names.
EVERYDAY = {"ranks": 2, "keras": 3}
EVERYDAY_PROGRAMS = "-tables-uneven-"
# `make test` leaves these to `make test-all`, as it should take 9 minutes: by
# file, parts of names. `make test` has another test of the same feature, with
# another model, option or mode; of examples and benchmarks it may have none.
LEFT_OUT = {
    "benchmarks/test_kernels.py": ("ours_and_stock", "other_widths"),
    "benchmarks/test_large_batches.py": ("a_short_run_prints",),
    "callbacks/test_nan_guard.py": (
        "good_batches[bad1",
        "good_batches[bad2",
    ),
    "callbacks/test_resume.py": (
        "repeats_and_drops_nothing[4",
        "repeats_and_drops_nothing[5",
        "repeats_and_drops_nothing[16",
        "repeats_and_drops_nothing[30",
        "position_in_a_batch_of_own_data_is_refused",
        "another_batch_size_of_arrays",
        "epoch_of_given_steps_may_hold",
        "monitor_goes_on[2",
    ),
    "comm/test_cancelled_steps.py": (
        "step_fails[all_gather",
        "step_fails[broadcast",
    ),
    "comm/test_deadlines.py": (
        "survived[100",
        "longer_silence_is_named[100",
        "says_goodbye",
    ),
    "comm/test_hosts.py": (
        "number_of_no_host_is_refused[2",
        "number_of_no_host_is_refused[5",
    ),
    "comm/test_process_group.py": ("debug_lines[1",),
    "comm/test_ranks.py": (
        "learns_what_to_do[change1",
        "learns_what_to_do[change2",
    ),
    "data/test_positioned.py": (
        "state_goes_on[generator-False",
        "state_goes_on[generator-True",
        "state_goes_on[stream-False",
    ),
    "examples/test_scripts.py": (
        "ml_100k",
        "async_nan",
        "movielens_asks_for_tf_keras",
    ),
    "layers/test_copies.py": (
        "test_models[False-<lambda>",
        "test_models[True-<lambda>",
    ),
    "layers/test_prefetch.py": (
        "trains_the_same[embedding",
        "trains_the_same[full_sparse",
        "trains_the_same[ragged",
        "trains_the_same[masked",
    ),
    "numbers/test_numbers.py": (
        "keras_loss/CategoricalCrossentropy/mean",
        "keras_loss/MeanSquaredLogarithmicError/sum",
        "loss/barlow_twins",
        "loss/function_mean",
        "loss/hard_examples",
        "loss/subclass_sum_reduction",
        "metric/function_maximum",
        "metric/keras/classes-",
        "metric/keras/one_hot_weighted",
        "metric/keras/positive_weighted",
        "metric/keras/recalls_weighted",
        "metric/state_maximum",
        "optimizer/keras/tables/Lion",
        "optimizer/keras/tables/RMSprop",
        "ranking/generalized_mean_step",
        "ranking/self_paced_step",
        "ranking/trimmed_step",
        "state/group_normalization",
        "state/vq_straight_through",
        "step/masked/centred",
        "step/sum_by_size",
        "step/tensordot",
        "sequence/recurrent/GRU",
    ),
    "ops/test_equal_processors.py": ("same_bits",),
    "ops/test_huge_pages.py": ("updated_tables[1",),
    "optimizers/test_against_keras.py": (
        "mirrored_strategy[SGD",
        "mirrored_strategy[Adagrad",
        "mirrored_strategy[Ftrl",
        "mirrored_strategy[RowWiseAdagrad",
    ),
    "process/test_asynchronous.py": (
        "updates_are_those_of_one_process[2-3-BAP",
        "not_too_old[column",
        "one_model_after_fit[2-3-SSP-Adagrad",
        "one_model_after_fit[2-3-SSP_row_cache",
    ),
    "process/test_balance.py": (
        "shares_change_no_number[loops-2-3-balance1",
        "slices_by_ids_change_no_number[2-3-measured",
    ),
    "process/test_compression.py": (
        "counters_differ",
        "in_turns",
        "least_squares",
        "compression_scenarios.optimizers",
    ),
    "process/test_consistency.py": (
        "larger_batches[2-3-SGD-False-options0",
        "larger_batches[2-3-SGD-False-options20",
        "larger_batches[2-3-Adagrad-True",
        "dense_bytes_fall[BSP",
        "dense_bytes_fall[Accumulate",
        "dense_bytes_fall[LocalSteps-gradients",
        "test_scenario[evaluated_and_saved-Accumulate",
        "test_scenario[evaluated_and_saved-LocalSteps-",
        "test_scenario[resumed-LocalSteps-",
        "test_scenario[resumed-LocalSteps_outer",
        "test_scenario[guarded-LocalSteps_tables",
        "test_scenario[exported-Accumulate",
        "test_scenario[local_replicas-LocalSteps-",
        "test_scenario[local_replicas-LocalSteps_tables",
        "accumulation_of_keras_is_that_of_one_process[2-3-fitted-arguments0",
        "accumulation_of_keras_is_that_of_one_process[2-3-fitted-arguments1",
        "need_not_delete_models_at_the_same_time[2-3-Accumulate",
        "need_not_delete_models_at_the_same_time[2-3-LocalSteps_tables",
        "need_not_delete_models_at_the_same_time[2-3-ASP",
        "need_not_delete_models_at_the_same_time[2-3-SSP",
        "test_scenario[guarded-ASP",
        "test_scenario[resumed-LocalSteps_tables",
        "test_scenario[local_replicas-ASP",
        "test_scenario[rolled_back",
    ),
    "process/test_deferred_rows.py": (
        "sums_of_rounds[2-3-Adagrad-True",
        "sums_of_rounds[2-3-Adagrad-False-True",
        "sums_of_rounds[2-3-Adagrad-False-False-options8",
        "change_bytes_only[2-3-row-float32-False",
        "change_bytes_only[2-3-column",
        "sums_of_rounds[2-3-Adagrad-False-False-options7",
    ),
    "process/test_embedding.py": (
        "whole/adagrad]",
        "whole/adagrad/weighted",
        "whole/row_wise_adagrad",
        "grid/row_wise_adagrad",
        "grid/adagrad",
        "dedup/mixed",
        "grid/own",
    ),
    "process/test_exchange.py": (
        "prefetch_scenarios.prefetch]",
        "exchange_scenarios.bfloat16",
    ),
    "process/test_features.py": ("in_model",),
    "process/test_fit.py": (
        "rows_that_occur_again",
        "split_options",
        "split_steps_together",
        "split_optimizers",
        "moving_average",
        "gradient_dtypes",
    ),
    "process/test_input.py": (
        "names_return",
        "input_scenarios.generators",
    ),
    "process/test_nested_graphs.py": (
        "nested_graph_scenarios.inference",
        "built_by_evaluate",
    ),
    "process/test_notebook.py": ("results_output_and_errors",),
    "process/test_placing.py": (
        "batches_that_are_known",
        "measured_at_start",
        "as_good_as_shared",
        "own_optimizers",
        "placing_scenarios.fixed",
        "placing_scenarios.shared",
    ),
    "process/test_ports.py": (
        "keras_rs_ranking/sas_rec",
        "keras_io/behaviour_sequence_transformer",
        "keras_io/collaborative_filtering",
        "keras_rs_ranking/dlrm_dcn_v2",
        "retrieval_trains_as_published",
        "keras_rs_ranking/basic_ranking",
    ),
    "process/test_row_clip.py": (
        "numpy[2-3-row_wise]",
        "column_wise, unique rows",
        "two calls",
        "large",
    ),
    "process/test_safetensors.py": ("written_here_read_there[2-3-2",),
    "process/test_same_numbers.py": (
        "row/sgd/regularized",
        "row/row_wise_adagrad",
        "column/keras_adam",
        "column/adam",
        "row/adagrad",
        "column/adagrad",
        "column/keras_adagrad",
        "replicated/sgd/regularized",
    ),
    "process/test_sequences.py": (
        "gru4rec/row/sgd",
        "hstu/row/sgd",
        "own_loss/row/sgd",
    ),
    "process/test_serving.py": (
        "deltas_of_keys",
        "deltas_of_int8",
    ),
    "process/test_sharing.py": (
        "changes_no_result[other_wire",
        "changes_no_result[dependent",
        "changes_no_result[twice",
        "changes_no_result[subclassed",
        "changes_no_result[sequential",
    ),
    "strategy/test_tracebacks.py": ("the_reason_comes_first[all",),
}

# What `make test` runs with another TensorFlow than the default one is what may
# differ between versions. Without ranks, by folder or file: the build, private
# names, hooks, ops, layers, optimizers and the strategy.
VERSION_TESTS = (
    "callbacks",
    "embedding",
    "layers",
    "ops",
    "optimizers",
    "saving",
    "strategy",
    "test_build.py",
    "test_hooks.py",
    "test_private_names.py",
)
# At 2 ranks with both Kerases, modules of scenarios: loops, input, graphs,
# checkpoints, files and export.
VERSION_SCENARIOS = (
    "file_callbacks_scenarios",
    "files_scenarios",
    "fit_scenarios",
    "input_scenarios",
    "nested_graph_scenarios",
    "saving_scenarios",
    "serving_scenarios",
    "tf_keras_files_scenarios",
)
# A SavedModel is served by a process of its own.
VERSION_PROCESS = "test_process_without_this_package"
# And compared programs of every day, by the begin of their names: loops, data
# and state, but not every loss, metric and step.
VERSION_PROGRAMS = (
    "callback/",
    "data/",
    "gradient/",
    "loop/",
    "optimizer/",
    "recommender/",
    "sequence/",
    "state/",
)


def check(items: list[pytest.Item]) -> None:
    """Checks the table of tests that `make test` leaves out.

    Args:
        items: all tests of some files.

    Raises:
        pytest.UsageError: an entry is in the name of no test of its file.
    """
    names: dict[str, list[str]] = {}
    for item in items:
        path = str(item.path.relative_to(TESTS))
        names.setdefault(path, []).append(item.name)
    for path, parts in LEFT_OUT.items():
        for part in parts:
            found = names.get(path)
            if found and not any(part in name for name in found):
                raise pytest.UsageError(
                    f"tests/tiers.py: no name of a test of {path} has {part!r}"
                )


def mark(item: pytest.Item) -> None:
    """Marks a test with its tier and with the commands that run it."""
    path = item.path.relative_to(TESTS)
    if path.parts[0] in TIERS:
        item.add_marker(TIERS[path.parts[0]])
    if str(path) in SLOW:
        item.add_marker("slow")
    if not _is_everyday(item, path):
        item.add_marker("extended")
    if _is_for_versions(item, path):
        item.add_marker("versions")


def arguments(item: pytest.Item) -> dict[str, Any]:
    """The parameters of a test."""
    return getattr(getattr(item, "callspec", None), "params", {})


def _is_everyday(item: pytest.Item, path: pathlib.Path) -> bool:
    """Whether `make test` runs a test; only `make test-all` runs the others."""
    left_out = LEFT_OUT.get(str(path), ())
    return _is_common(item, path) and not any(map(item.name.count, left_out))


def _is_common(item: pytest.Item, path: pathlib.Path) -> bool:
    """Whether a test is of the sizes and programs of every day."""
    tier = TIERS.get(path.parts[0])
    if tier is None:
        marks = {mark.name for mark in item.iter_markers()}
        return not {"slow", "process", "fault"} & marks
    if tier == "fault" or not EVERYDAY.items() <= arguments(item).items():
        return False
    return path.parts[0] != "numbers" or EVERYDAY_PROGRAMS in item.name


def _is_for_versions(item: pytest.Item, path: pathlib.Path) -> bool:
    """Whether `make test` runs a test with another TensorFlow."""
    folder, name = path.parts[0], item.name
    if folder == "numbers":
        programs = [f"[{program}" for program in VERSION_PROGRAMS]
        return _is_common(item, path) and any(map(name.count, programs))
    if folder == "process":
        modules = [f"-{module}." for module in VERSION_SCENARIOS]
        chosen = any(map(name.count, (*modules, VERSION_PROCESS)))
        return chosen and arguments(item).get("ranks") == 2
    if not {str(path), folder} & set(VERSION_TESTS):
        return False
    hooks = str(path) == "test_hooks.py"  # In both Kerases, some with ranks.
    return hooks or _is_common(item, path)
