"""Tests of torch's that fail over hfreduce, and the reason of each; tests for `make test-all`."""

from tests.torch_suite.ranks import Outcome

_SYNC_BATCH_NORM = "needs SyncBatchNorm, which torch refuses on the CPU"
_MONITORED_BARRIER = "torch offers monitored_barrier to gloo alone"
_SELF = "hfreduce: a rank cannot send to itself (nor can it over gloo)"
_DIVERGING = (
    "compares diverging parameters to 1.3e-6; a mean over 3 ranks rounds (fails over gloo, too)"
)
_GLOO_TIMEOUT = "asserts gloo's text of a timeout"
_NCCL_TIMEOUT = "asserts NCCL's text of a timeout in an error of a barrier"

EXPECTED_FAILURES = {
    "test_DistributedDataParallel_SyncBatchNorm": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_half": _SYNC_BATCH_NORM,
    "test_barrier_timeout_full_group": _GLOO_TIMEOUT,
    "test_barrier_timeout_global": _GLOO_TIMEOUT,
    "test_batch_isend_irecv_nccl": _SELF,
    "test_batch_isend_irecv_self_nccl": _SELF,
    "test_ddp_apply_optim_in_backward": _DIVERGING,
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": _DIVERGING,
    "test_ddp_device": "asserts the index of the CUDA device to which DDP moves its inputs",
    "test_ddp_inference": _SYNC_BATCH_NORM,
    "test_ddp_logging_data_gpu": "asserts the numbers of CUDA devices in what DDP logs",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": _SYNC_BATCH_NORM,
    "test_monitored_barrier_allreduce_hang": _NCCL_TIMEOUT,
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": _NCCL_TIMEOUT,
    "test_monitored_barrier_failure_order": _MONITORED_BARRIER,
    "test_monitored_barrier_gloo": _MONITORED_BARRIER,
    "test_monitored_barrier_gloo_rank_0_timeout": _MONITORED_BARRIER,
    "test_monitored_barrier_gloo_subgroup": _MONITORED_BARRIER,
    "test_monitored_barrier_wait_all_ranks": _MONITORED_BARRIER,
    "test_nccl_high_priority_stream": "needs the class ProcessGroupNCCL",
    "test_sync_bn_logged": _SYNC_BATCH_NORM,
}

# Seconds after which a test is known to hang.
EXPECTED_HANGS: dict[str, float] = {}

# One test or two for everything that torch's tests cover, for `make test-all`.
MOST_TELLING = (
    "test_all_reduce_sum",
    "test_all_reduce_sum_async",
    "test_all_reduce_group_min",
    "test_all_reduce_sum_complex",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_coalesced_full_group_max",
    "test_sparse_all_reduce_sum",
    "test_nccl_backend_bool_allreduce",
    "test_reduce_group_product",
    "test_reduce_scatter_tensor_cuda",
    "test_broadcast",
    "test_all_gather_complex",
    "test_all_gather_into_stack_tensor_cuda",
    "test_all_gather_v_cuda",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_subgroup",
    "test_gather_group",
    "test_gather_checks",
    "test_scatter_complex",
    "test_scatter_object_list",
    "test_all_to_all_group",
    "test_all_to_all_single_unequal_split_complex",
    "test_barrier_group",
    "test_barrier_timeout_group",
    "test_coalescing_manager_async",
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
    "test_isend",
    "test_batch_isend_irecv_gloo_tags",
    "test_destroy_full_group",
    "test_get_future",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_join_model_equivalence",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
    "test_ddp_uneven_input_exception",
    "test_post_localSGD_optimizer_parity",
    "test_static_graph_multi_forward",
)


def surprise(name: str, outcome: Outcome) -> str:
    """Compare an outcome with the list.

    Returns:
        The difference, or nothing.
    """
    reason = EXPECTED_FAILURES.get(name)
    if outcome.kind == "failed":
        return "" if reason else f"failed: {outcome.text}"
    return f"{outcome.kind}, but is listed as a failure: {reason}" if reason else ""
