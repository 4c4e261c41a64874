"""Everything that weft uses of torch without a public name: where it is, in which versions, and what needs it.

Names are the same in every version that is supported, unless `since` or `until` says otherwise. A test finds private
names elsewhere, and another compares this file with the installed torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from weft import private_names
from weft.version import TESTED_TORCH

_TORCH = private_names.Library("torch", lambda: str(torch.__version__), TESTED_TORCH)
Private = partial(private_names.Private, _TORCH)
Attribute = partial(private_names.Attribute, _TORCH)

# -- autograd ------------------------------------------------------------------------------------------------

graph_task_id = Private("torch._C", "_current_graph_task_id", "a strategy: is a backward pass running, and which")
current_node = Private("torch._C", "_current_autograd_node", "a rehearsal")
interpreter = Private("torch._C._functorch", "peek_interpreter_stack", "a strategy: does torch.func run")
is_functorch_tensor = Private("torch._C._functorch", "is_functorch_wrapped_tensor", "checksums")
execution_engine = Private("torch.autograd:Variable", "_execution_engine", "a strategy: the end of a backward pass")
run_backward = Private("torch.autograd.graph", "_engine_run_backward", "with_precision: fp16, which backward runs")
FORWARD_CLASS = Attribute("torch.autograd.function:BackwardCFunction", "_forward_cls", "with_precision: fp16")
keeps_version = Private("torch.autograd", "_unsafe_preserve_version_counter", "recompute")
without_subclasses = Private("torch._C", "DisableTorchFunctionSubclass", "tensors of weft's own classes")
without_functions = Private("torch._C", "DisableTorchFunction", "a rehearsal")
make_subclass = Private("torch:Tensor", "_make_wrapper_subclass", "tensors of weft's own classes")
BASE = Attribute("torch:Tensor", "_base", "fully_shard: views")
IS_VIEW = Attribute("torch:Tensor", "_is_view", "zero_partition: views")
VERSION = Attribute("torch:Tensor", "_version", "checks of what was written")
TENSOR_HOOKS = Attribute("torch:Tensor", "_backward_hooks", "checks of hooks on parameters")
ACCUMULATE_HOOKS = Attribute("torch:Tensor", "_post_accumulate_grad_hooks", "checks of hooks on parameters")
SPARSE_VALUES = Attribute("torch:Tensor", "_values", "with_precision: fp16, sparse gradients")
STORAGE_ADDRESS = Attribute("torch.storage:UntypedStorage", "_cdata", "what shares memory")

# -- modules and optimizers ------------------------------------------------------------------------------------

_MODULE = "torch.nn.modules.module:Module"
_OPTIMIZER = "torch.optim.optimizer:Optimizer"
PARAMETERS = Attribute(_MODULE, "_parameters", "every transform")
BUFFERS = Attribute(_MODULE, "_buffers", "every transform")
MODULES = Attribute(_MODULE, "_modules", "lists of experts")
CALL = Attribute(_MODULE, "_call_impl", "what is around the calls of a module")
COMPILED_CALL = Attribute(_MODULE, "_compiled_call_impl", "what is around the calls of a module")
FORWARD_HOOKS = Attribute(_MODULE, "_forward_hooks", "probes; undo")
FORWARD_PRE_HOOKS = Attribute(_MODULE, "_forward_pre_hooks", "probes; undo")
FORWARD_HOOKS_WITH_KWARGS = Attribute(_MODULE, "_forward_hooks_with_kwargs", "undo")
FORWARD_PRE_HOOKS_WITH_KWARGS = Attribute(_MODULE, "_forward_pre_hooks_with_kwargs", "undo")
FORWARD_HOOKS_ALWAYS = Attribute(_MODULE, "_forward_hooks_always_called", "undo")
BACKWARD_HOOKS = Attribute(_MODULE, "_backward_hooks", "checks of hooks")
STATE_DICT_PRE_HOOKS = Attribute(_MODULE, "_state_dict_pre_hooks", "undo of fully_shard; full_params")
LOAD_PRE_HOOKS = Attribute(_MODULE, "_load_state_dict_pre_hooks", "undo of fully_shard")
LOAD_POST_HOOKS = Attribute(_MODULE, "_load_state_dict_post_hooks", "undo of fully_shard")
STEP_PRE_HOOKS = Attribute(_OPTIMIZER, "_optimizer_step_pre_hooks", "strategies that step in parts")
STEP_POST_HOOKS = Attribute(_OPTIMIZER, "_optimizer_step_post_hooks", "strategies that step in parts")
LOAD_OPTIMIZER_PRE_HOOKS = Attribute(_OPTIMIZER, "_optimizer_load_state_dict_pre_hooks", "restore")
LOAD_OPTIMIZER_POST_HOOKS = Attribute(_OPTIMIZER, "_optimizer_load_state_dict_post_hooks", "restore")
call_functional = Private("torch.nn.utils.stateless", "_functional_call", "fully_shard inside functional_call")
batch_norm = Private("torch.nn.modules.batchnorm", "_BatchNorm", "sync_batch_norm")
CHECK_SHAPE = Attribute("torch.nn.modules.batchnorm:BatchNorm1d", "_check_input_dim", "sync_batch_norm")
norm_base = Private("torch.nn.modules.batchnorm", "_NormBase", "recompute")
dropout = Private("torch.nn.modules.dropout", "_DropoutNd", "zero_partition: what draws")
sync_batch_norm = Private("torch.nn.modules._functions", "SyncBatchNorm", "sync_batch_norm")
extra_state = Private("torch.nn.modules.module", "_EXTRA_STATE_KEY_SUFFIX", "checkpoints: what modules add")
COMPILED_MODULE = Attribute("torch._dynamo.eval_frame:OptimizedModule", "_orig_mod", "compile; names in checkpoints")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """`torch.compiler.disable`, but the compiler is imported in the first call, and not here."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call  # type: ignore[return-value]


# -- fully sharded data parallelism ----------------------------------------------------------------------------

_FSDP = "torch.distributed.fsdp._fully_shard."
_STATE, _GROUP, _PARAM = (
    f"{_FSDP}_fsdp_state:FSDPState",
    f"{_FSDP}_fsdp_param_group:FSDPParamGroup",
    f"{_FSDP}_fsdp_param:FSDPParam",
)
FSDP_STATE = Attribute(f"{_FSDP}_fully_shard:FSDPModule", "_get_fsdp_state", "fully_shard")
STATE_TRAINING = Attribute(_STATE, "_training_state", "fully_shard: forward or backward")
STATE_COMM = Attribute(_STATE, "_comm_ctx", "fully_shard: the order of gathers")
STATE_SHARED = Attribute(_STATE, "_state_ctx", "fully_shard: all units of a model")
STATE_INIT = Attribute(_STATE, "_lazy_init", "fully_shard: which unit is the outermost")
STATE_IS_ROOT = Attribute(_STATE, "_is_root", "fully_shard: which unit is the outermost")
STATE_GROUP = Attribute(_STATE, "_fsdp_param_group", "fully_shard", instead="_fsdp_param_groups, in torch 2.12")
STATE_GROUPS = Attribute(_STATE, "_fsdp_param_groups", "fully_shard", since="2.12")
STATE_TO_RUN = Attribute(_STATE, "_modules_to_run_forward", "fully_shard: after a forward that raised")
STATE_BEFORE = Attribute(_STATE, "_pre_forward", "fully_shard: methods=")
STATE_AFTER = Attribute(_STATE, "_post_forward", "fully_shard: methods=")
STATE_LAST = Attribute(_STATE, "_register_root_post_backward_final_callback", "fully_shard: the end of backward")
GROUP_GATHER = Attribute(_GROUP, "_all_gather_comm", "fully_shard: gathers in one order")
GROUP_REDUCE = Attribute(_GROUP, "_reduce_scatter_comm", "fully_shard: reductions in one order")
GROUP_PARTIAL = Attribute(_GROUP, "_partial_reduce_output", "fully_shard: windows on hybrid meshes")
GROUP_CALLS = Attribute(_GROUP, "_post_forward_indices", "probes: prefetches")
GROUP_TRAINING = Attribute(_GROUP, "_training_state", "fully_shard: after a forward that raised")
GROUP_RESHARD = Attribute(_GROUP, "_to_sharded", "fully_shard: after a forward that raised")
PARAM_NAME = Attribute(_PARAM, "_param_fqn", "fully_shard: names in errors")
PARAM_WHOLE = Attribute(_PARAM, "_unsharded_param", "fully_shard: gathered parameters")
PARAM_LEFT = Attribute(_PARAM, "_sharded_post_forward_param", "fully_shard: reshard_after_forward=int")
PARAM_HOME = Attribute(_PARAM, "_module_info", "fully_shard: whose parameter it is")
PARAM_SPEC = Attribute(_PARAM, "_unsharded_dtensor_spec", "fully_shard beside tensor_parallel", since="2.12")
PARAM_SPEC_BEFORE = Attribute(
    _PARAM, "_tp_spec", "fully_shard beside tensor_parallel", until="2.12", instead="_unsharded_dtensor_spec"
)
chunk = Private(f"{_FSDP}_fsdp_common", "_chunk_with_empty", "a rehearsal")

# -- data parallelism ------------------------------------------------------------------------------------------

_REDUCER = "torch.distributed:Reducer"
assign_buckets = Private("torch.distributed", "_compute_bucket_assignment_by_size", "replicate")
FIRST_BUCKET_BYTES = Private("torch.distributed", "_DEFAULT_FIRST_BUCKET_BYTES", "replicate")
broadcast_coalesced = Private("torch.distributed", "_broadcast_coalesced", "strategies: equal parameters")
active_ddp = Private("torch.nn.parallel:DistributedDataParallel", "_get_active_ddp_module", "checks of the first steps")
REBUILD_BUCKETS = Attribute(_REDUCER, "_rebuild_buckets", "replicate")
BUCKET_VIEWS = Attribute(_REDUCER, "_get_zeros_like_grad_buckets", "replicate")
REDUCER_FINISHED = Attribute(_REDUCER, "_check_reducer_finalized", "replicate")
register_comm_hook = Private("torch.distributed", "_register_comm_hook", "replicate")

# -- process groups --------------------------------------------------------------------------------------------

_C10D = "torch.distributed.distributed_c10d"
_PG = "torch._C._distributed_c10d:ProcessGroup"
default_store = Private(_C10D, "_get_default_store", "adopt")
abort_group = Private(_C10D, "_abort_process_group", "the end of a job that failed")
world = Private(_C10D, "_world", "which groups there are")
work_of = Private("torch._C._distributed_c10d", "_create_work_from_future", "pretended ranks")
find_group = Private("torch._C._distributed_c10d", "_resolve_process_group", "a rehearsal: functional collectives")
GROUP_NAMER = Attribute(_C10D, "_process_group_name", "sub-contexts: the same name on all ranks")
BACKEND_OF = Attribute(_PG, "_get_backend", "sub-contexts")
DEVICE_TYPES = Attribute(_PG, "_device_types", "adopt: the timeout")
SET_TIMEOUT = Attribute("torch._C._distributed_c10d:ProcessGroupGloo", "_set_default_timeout", "elastic jobs")
OPTIONS_TIMEOUT = Attribute("torch._C._distributed_c10d:Backend.Options", "_timeout", "adopt: the timeout")

_FUNCTIONAL = "torch.distributed._functional_collectives"
all_gather_single = Private(_FUNCTIONAL, "all_gather_single", "context_parallel", since="2.13")
all_gather_tensor = Private(_FUNCTIONAL, "all_gather_tensor", "context_parallel, before that")
reduce_scatter_single = Private(_FUNCTIONAL, "reduce_scatter_single", "context_parallel", since="2.13")
reduce_scatter_tensor = Private(_FUNCTIONAL, "reduce_scatter_tensor", "context_parallel, before that")
all_to_all = Private(_FUNCTIONAL, "all_to_all_single", "context_parallel")
wait_for = Private(_FUNCTIONAL, "wait_tensor", "context_parallel")
functional_all_reduce = Private("torch:ops._c10d_functional", "all_reduce", "probes: is anything sent")

# -- DTensor and device meshes ---------------------------------------------------------------------------------

_DTENSOR = "torch.distributed.tensor:DTensor"
_DISPATCHER = "torch.distributed.tensor._dispatch:OpDispatcher"
DTENSOR_PART = Attribute(_DTENSOR, "_local_tensor", "lines over sharded parameters")
DTENSOR_SPEC = Attribute(_DTENSOR, "_spec", "layouts over several axes")
DISPATCHER = Attribute(_DTENSOR, "_op_dispatcher", "lines over sharded parameters")
read_number = Private("torch:ops.aten", "_local_scalar_dense", "lines over sharded parameters")
OWN_OPERATIONS = Attribute(_DISPATCHER, "_custom_op_handlers", "lines over sharded parameters")
DISPATCH_STEPS = tuple(
    Attribute(_DISPATCHER, name, "errors of operations on sharded parameters", since, until)
    for name, since, until in (  # all of it before torch 2.10; since then, what is not done in C++
        ("dispatch", "", "2.10"),
        ("_propagate_op_sharding_dispatch_slow_path", "2.10", ""),
        ("_dispatch_get_local_results_slow_path", "2.10", ""),
        ("_dispatch_fast_path_python_tail", "2.10", ""),
    )
)
strided_shard = Private(
    "torch.distributed.tensor.placement_types", "_StridedShard", "fully_shard beside tensor_parallel"
)
block_of = Private("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset", "checkpoints of shards")
DISTRIBUTED = Attribute(
    "torch.distributed.tensor._api:distribute_module", "_distribute_module_applied", "undo of tensor_parallel"
)
propagator = Private("torch.distributed.tensor._sharding_prop", "ShardingPropagator", "a rehearsal")
CLEAR_PROPAGATION = tuple(
    Private("torch.distributed.tensor.debug", name, "the end of a context", since)
    for name, since in (("_clear_sharding_prop_cache", "2.13"), ("_clear_python_sharding_prop_cache", "2.10"))
)
JOIN_MESHES = Attribute(
    "torch.distributed.device_mesh:DeviceMesh", "_concatenate", "zero_partition on hybrid meshes", since="2.10"
)
mesh_resources = Private("torch.distributed.device_mesh", "_mesh_resources", "the same, before that")

# -- loaders ---------------------------------------------------------------------------------------------------

_LOADER = "torch.utils.data.dataloader"
base_iterator = Private(_LOADER, "_BaseDataLoaderIter", "shard_data")
single_iterator = Private(_LOADER, "_SingleProcessDataLoaderIter", "shard_data")
worker_iterator = Private(_LOADER, "_MultiProcessingDataLoaderIter", "shard_data")
LENGTH_CALLED = Attribute(f"{_LOADER}:DataLoader", "_IterableDataset_len_called", "shard_data")
SAMPLER_ITERATOR = Attribute(f"{_LOADER}:_BaseDataLoaderIter", "_sampler_iter", "shard_data")
NEXT_DATA = Attribute(f"{_LOADER}:_BaseDataLoaderIter", "_next_data", "shard_data")
worker = Private("torch.utils.data", "_utils", "shard_data: which worker this is")

# -- dispatch and fake tensors ---------------------------------------------------------------------------------

dispatch_mode = Private("torch.utils._python_dispatch", "TorchDispatchMode", "probes; a rehearsal")
without_modes = Private("torch.utils._python_dispatch", "_disable_current_modes", "recompute; a rehearsal")
tree = Private("torch.utils", "_pytree", "nested values as torch sees them")
fake_tensor = Private("torch._subclasses.fake_tensor", "FakeTensor", "a rehearsal")
fake_mode = Private("torch._subclasses.fake_tensor", "FakeTensorMode", "a rehearsal")
without_fakes = Private("torch._subclasses.fake_tensor", "unset_fake_temporarily", "a rehearsal")
schema = Attribute("torch._ops:OpOverload", "_schema", "probes; a rehearsal")

# -- operations on many tensors --------------------------------------------------------------------------------

foreach_copy = Private("torch", "_foreach_copy_", "averages; replicas")
foreach_mul = Private("torch", "_foreach_mul_", "gradients")
foreach_div = Private("torch", "_foreach_div_", "gradients")
foreach_zero = Private("torch", "_foreach_zero_", "gradients")
foreach_norm = Private("torch", "_foreach_norm", "clip_grads")
foreach_clamp_min = Private("torch", "_foreach_clamp_min_", "clip_grads")
foreach_clamp_max = Private("torch", "_foreach_clamp_max_", "clip_grads")
foreach_lerp = Private("torch", "_foreach_lerp_", "average_weights")
update_scale = Private("torch", "_amp_update_scale_", "with_precision: fp16")
unscale = Private("torch", "_amp_foreach_non_finite_check_and_unscale_", "with_precision: fp16")
check_later = Private("torch", "_assert_async", "vocab_cross_entropy")
scaled_product = Private("torch", "_scaled_mm", "with_precision: fp8")
