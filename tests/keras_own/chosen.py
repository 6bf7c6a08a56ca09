# SPDX-License-Identifier: Apache-2.0
"""Which of Keras's own tests run, which of them always, and which cannot."""

MODULES = (
    "trainers.trainer_test",
    "callbacks.backup_and_restore_test",
    "callbacks.callback_test",
    "callbacks.csv_logger_test",
    "callbacks.early_stopping_test",
    "callbacks.lambda_callback_test",
    "callbacks.learning_rate_scheduler_test",
    "callbacks.model_checkpoint_test",
    "callbacks.monitor_callback_test",
    "callbacks.orbax_checkpoint_test",
    "callbacks.reduce_lr_on_plateau_test",
    "callbacks.remote_monitor_test",
    "callbacks.swap_ema_weights_test",
    "callbacks.tensorboard_test",
    "callbacks.terminate_on_nan_test",
)
# Those of `make test`: each way through a loop, each kind of data, and each
# callback once. `make test-keras` runs all.
ALWAYS = {
    "trainers.trainer_test": (
        "evaluate_sparse_tf_graph",
        "evaluate_with_different_batch_size_same_loss",
        "fit_flow_steps_per_epoch_graph_fn",
        "fit_sparse_tf_graph",
        "fit_with_data_adapter_generator_infinite",
        "fit_with_data_adapter_py_dataset",
        "fit_with_val_split_graph_fn",
        "for_eval_epoch_iterator",
        "loss_weights",
        "max_epochs_and_steps",
        "metric_update_in_compute_loss",
        "on_batch_methods_graph_fn",
        "predict_flow_struct_graph_fn",
        "predict_preserve_order_50_non_jit",
        "recompile",
        "steps_per_execution_steps_per_epoch_unknown_data_size_match_non_jit",
    ),
    "callbacks.backup_and_restore_test": ("best_case_step",),
    "callbacks.callback_test": ("model_state_is_current_on_epoch_end",),
    "callbacks.csv_logger_test": ("stop_training_csv",),
    "callbacks.early_stopping_test": ("early_stopping_patience",),
    "callbacks.learning_rate_scheduler_test": ("updates_learning_rate",),
    "callbacks.model_checkpoint_test": ("model_checkpoint_loading",),
    "callbacks.reduce_lr_on_plateau_test": ("cooldown",),
    "callbacks.swap_ema_weights_test": ("swap_ema_weights_on_epoch",),
    "callbacks.tensorboard_test": ("TensorBoard_basic",),
    "callbacks.terminate_on_nan_test": ("TerminateOnNaN",),
}
# Why a test says nothing of several ranks: "module.Class.test" to the reason.
# Tests that Keras itself skips on TensorFlow, or whose package (Grain, JAX,
# Orbax, PyTorch, SciPy) is not installed, are skipped and need no entry.
_NO_MODEL = "Its models are no keras.Model, whose on_batch methods take slices."
CANNOT_APPLY: dict[str, str] = {
    **{
        f"trainers.trainer_test.TestTrainer.test_{name}": _NO_MODEL
        for name in (
            "nested_inputs",
            "on_batch_methods_eager",
            "on_batch_methods_without_training_eager",
        )
    },
    "callbacks.swap_ema_weights_test.SwapEMAWeightsTest"
    ".test_swap_ema_weights_with_tf_distribute": (
        "It makes a strategy of its own, inside of ours."
    ),
}
