"""Everything that weft uses of torch without a public name: where it is, in which versions, and what needs it.

Names are the same in every version that is supported, unless `since` or `until` says otherwise. A test finds private
names elsewhere, and another compares this file with the installed torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from weft import private_names
from weft.version import TESTED_TORCH

LIBRARY = private_names.SupportedLibrary("torch", lambda: str(torch.__version__), TESTED_TORCH)
Private = partial(private_names.Private, LIBRARY)
Attribute = partial(private_names.Attribute, LIBRARY)

# -- autograd ------------------------------------------------------------------------------------------------

graph_task_id = Private("torch._C", "_current_graph_task_id", "a strategy: is a backward pass running, and which")
current_node = Private("torch._C", "_current_autograd_node", "a rehearsal")
interpreter = Private("torch._C._functorch", "peek_interpreter_stack", "a strategy: does torch.func run")
is_functorch_tensor = Private("torch._C._functorch", "is_functorch_wrapped_tensor", "checksums")
execution_engine = Private("torch.autograd:Variable", "_execution_engine", "a strategy: the end of a backward pass")
run_backward = Private("torch.autograd.graph", "_engine_run_backward", "with_precision: fp16; the watch for stragglers")
NODE_CLASS = Attribute("torch.autograd.function:Function", "_backward_cls", "with_precision: fp16")
checkpoint_hook = Private("torch.utils.checkpoint", "_checkpoint_hook", "keyed_dropout: what torch computes again")
saved_tensor_hooks = Private("torch._C._autograd", "_top_saved_tensors_default_hooks", "keyed_dropout: as above")
keeps_version = Private("torch.autograd", "_unsafe_preserve_version_counter", "recompute")
profiles = Private("torch.autograd", "_profiler_enabled", "shard_data: batches have names in a profile")
without_subclasses = Private("torch._C", "DisableTorchFunctionSubclass", "tensors of weft's own classes")
without_functions = Private("torch._C", "DisableTorchFunction", "a rehearsal")
make_subclass = Private("torch:Tensor", "_make_wrapper_subclass", "tensors of weft's own classes")
BASE = Attribute("torch:Tensor", "_base", "fully_shard: views")
IS_VIEW = Attribute("torch:Tensor", "_is_view", "zero_partition: views")
VERSION = Attribute("torch:Tensor", "_version", "checks of what was written")
TENSOR_HOOKS = Attribute("torch:Tensor", "_backward_hooks", "checks of hooks on parameters")
ACCUMULATE_HOOKS = Attribute("torch:Tensor", "_post_accumulate_grad_hooks", "checks of hooks on parameters")
IS_PARAMETER = Attribute("torch.nn.parameter:Parameter", "_is_param", "parameters that another rank has")
HOLDERS = Attribute("torch:Tensor", "_use_count", "rehearsals beside real runs")
SPARSE_INDICES = Attribute("torch:Tensor", "_indices", "rehearsals of sparse gradients")
SPARSE_VALUES = Attribute("torch:Tensor", "_values", "with_precision: fp16, sparse gradients")
file_view = Private("torch.distributed.checkpoint.utils", "_create_file_view", "import_dcp: a part of a file")
STORAGE_ADDRESS = Attribute("torch.storage:UntypedStorage", "_cdata", "what shares memory")

# -- modules and optimizers ------------------------------------------------------------------------------------

_MODULE = "torch.nn.modules.module:Module"
_OPTIMIZER = "torch.optim.optimizer:Optimizer"
PARAMETERS = Attribute(_MODULE, "_parameters", "every transform")
BUFFERS = Attribute(_MODULE, "_buffers", "every transform")
NON_PERSISTENT = Attribute(_MODULE, "_non_persistent_buffers_set", "strategies of modules with buffers")
MODULES = Attribute(_MODULE, "_modules", "lists of experts")
APPLY = Attribute(_MODULE, "_apply", "place; load_weights")
CALL = Attribute(_MODULE, "_call_impl", "what is around the calls of a module")
COMPILED_CALL = Attribute(_MODULE, "_compiled_call_impl", "what is around the calls of a module")
FORWARD_HOOKS = Attribute(_MODULE, "_forward_hooks", "probes; undo")
FORWARD_PRE_HOOKS = Attribute(_MODULE, "_forward_pre_hooks", "probes; undo")
FORWARD_HOOKS_WITH_KWARGS = Attribute(_MODULE, "_forward_hooks_with_kwargs", "undo")
FORWARD_PRE_HOOKS_WITH_KWARGS = Attribute(_MODULE, "_forward_pre_hooks_with_kwargs", "undo")
FORWARD_HOOKS_ALWAYS = Attribute(_MODULE, "_forward_hooks_always_called", "undo")
STATE_DICT_PRE_HOOKS = Attribute(_MODULE, "_state_dict_pre_hooks", "undo of fully_shard; full_params")
LOAD_PRE_HOOKS = Attribute(_MODULE, "_load_state_dict_pre_hooks", "undo of fully_shard")
LOAD_POST_HOOKS = Attribute(_MODULE, "_load_state_dict_post_hooks", "undo of fully_shard")
STEP_PRE_HOOKS = Attribute(_OPTIMIZER, "_optimizer_step_pre_hooks", "strategies that step in parts")
STEP_POST_HOOKS = Attribute(_OPTIMIZER, "_optimizer_step_post_hooks", "strategies that step in parts")
LOAD_OPTIMIZER_PRE_HOOKS = Attribute(_OPTIMIZER, "_optimizer_load_state_dict_pre_hooks", "restore")
LOAD_OPTIMIZER_POST_HOOKS = Attribute(_OPTIMIZER, "_optimizer_load_state_dict_post_hooks", "restore")
OPTIMIZER_HOOKS = (
    STEP_PRE_HOOKS,
    STEP_POST_HOOKS,
    Attribute(_OPTIMIZER, "_optimizer_state_dict_pre_hooks", "the engine deepspeed"),
    Attribute(_OPTIMIZER, "_optimizer_state_dict_post_hooks", "the engine deepspeed"),
    LOAD_OPTIMIZER_PRE_HOOKS,
    LOAD_OPTIMIZER_POST_HOOKS,
)
ALL_STEP_PRE_HOOKS = Private("torch.optim.optimizer", "_global_optimizer_pre_hooks", "strategies: whose step it is")
ALL_STEP_POST_HOOKS = Private("torch.optim.optimizer", "_global_optimizer_post_hooks", "strategies: whose step it is")
call_functional = Private("torch.nn.utils.stateless", "_functional_call", "fully_shard inside functional_call")
batch_norm = Private("torch.nn.modules.batchnorm", "_BatchNorm", "sync_batch_norm")
applied = Private("torch.distributed._composable.contract", "_get_registry", "recompute: what is recomputed already")
CHECK_SHAPE = Attribute("torch.nn.modules.batchnorm:BatchNorm1d", "_check_input_dim", "sync_batch_norm")
norm_base = Private("torch.nn.modules.batchnorm", "_NormBase", "recompute")
dropout = Private("torch.nn.modules.dropout", "_DropoutNd", "zero_partition: what draws")
sync_batch_norm = Private("torch.nn.modules._functions", "SyncBatchNorm", "sync_batch_norm")
extra_state = Private("torch.nn.modules.module", "_EXTRA_STATE_KEY_SUFFIX", "checkpoints: what modules add")
backends = Private("torch._dynamo.eval_frame", "cached_backends", "a rehearsal")
compiled_module = Private("torch._dynamo", "OptimizedModule", "compile: what is compiled already")
COMPILED_MODULE = Attribute("torch._dynamo.eval_frame:OptimizedModule", "_orig_mod", "compile; names in checkpoints")

_disable_later = Private("torch", "_disable_dynamo", "what runs outside of compiled code", instead="compiler.disable")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """`torch.compiler.disable`, but where torch has a way to, the compiler is imported in the first call."""
    disable: Any = _disable_later if _disable_later.exists else torch.compiler.disable
    untraced: _Function = disable(function)
    return untraced


# -- fully sharded data parallelism ----------------------------------------------------------------------------

_FSDP = "torch.distributed.fsdp._fully_shard."
_SHARDED = f"{_FSDP}_fully_shard:fully_shard"
_STATE = f"{_FSDP}_fsdp_state:FSDPState"
_GROUP = f"{_FSDP}_fsdp_param_group:FSDPParamGroup"
_PARAM = f"{_FSDP}_fsdp_param:FSDPParam"
_TRAINING = f"{_FSDP}_fsdp_common:TrainingState"
_CONTEXT = f"{_FSDP}_fsdp_param_group:FSDPCommContext"
IN_FORWARD = Private(_TRAINING, "FORWARD", "fully_shard: after a forward that raised")
BEFORE_BACKWARD = Private(_TRAINING, "PRE_BACKWARD", "fully_shard beside pipeline")
IDLE = Private(_TRAINING, "IDLE", "fully_shard: after a forward that raised")
module_states = Private("torch.distributed._composable_state", "_module_state_mapping", "undo of fully_shard")
IS_MANAGED = Attribute(_SHARDED, "_is_fsdp_managed_module", "checks of what is sharded already")
HAS_PARAMETERS = Attribute(_SHARDED, "_fsdp_use_orig_params", "undo of fully_shard")
CONTEXT_CALLS = Attribute(_CONTEXT, "post_forward_order", "fully_shard: which unit a call ended with; probes")
FSDP_STATE = Attribute(f"{_FSDP}_fully_shard:FSDPModule", "_get_fsdp_state", "fully_shard")
STATE_TRAINING = Attribute(_STATE, "_training_state", "fully_shard: forward or backward")
STATE_COMM = Attribute(_STATE, "_comm_ctx", "fully_shard: the order of gathers")
STATE_SHARED = Attribute(_STATE, "_state_ctx", "fully_shard: all units of a model")
STATE_INIT = Attribute(_STATE, "_lazy_init", "fully_shard: which unit is the outermost")
STATE_IS_ROOT = Attribute(_STATE, "_is_root", "fully_shard: which unit is the outermost")
STATE_GROUP = Attribute(_STATE, "_fsdp_param_group", "fully_shard", instead="_fsdp_param_groups, in torch 2.12")
STATE_GROUPS = Attribute(_STATE, "_fsdp_param_groups", "fully_shard", since="2.12")
STATE_DEVICE = Attribute(_STATE, "_device", "fully_shard: after a forward that raised")
STATE_TO_RUN = Attribute(_STATE, "_modules_to_run_forward", "fully_shard: after a forward that raised")
STATE_BEFORE = Attribute(_STATE, "_pre_forward", "fully_shard: methods=")
STATE_AFTER = Attribute(_STATE, "_post_forward", "fully_shard: methods=")
STATE_LAST = Attribute(_STATE, "_register_root_post_backward_final_callback", "fully_shard: the end of backward")
GROUP_CONTEXT = Attribute(_GROUP, "comm_ctx", "probes: prefetches")
GROUP_AFTER_BACKWARD = Attribute(_GROUP, "post_backward", "fully_shard: parameters without gradient")
GROUP_PARTIAL = Attribute(_GROUP, "_partial_reduce_output", "fully_shard: windows on hybrid meshes")
GROUP_CALLS = Attribute(_GROUP, "_post_forward_indices", "probes: prefetches")
GROUP_TRAINING = Attribute(_GROUP, "_training_state", "fully_shard: after a forward that raised")
GROUP_RESHARD = Attribute(_GROUP, "_to_sharded", "fully_shard: after a forward that raised")
PARAM_DTYPE = Attribute(_PARAM, "param_dtype", "with_precision(gather=...)")
PARAM_INIT_DTYPES = Attribute(_PARAM, "init_dtype_attrs", "with_precision(gather=...)")
PARAM_INIT_WHOLE = Attribute(_PARAM, "init_unsharded_param", "with_precision(gather=...)")
PARAM_KEPT = Attribute(_PARAM, "unsharded_accumulated_grad", "fully_shard: gradients of windows")
PARAM_NAME = Attribute(_PARAM, "_param_fqn", "fully_shard: names in errors")
PARAM_WHOLE = Attribute(_PARAM, "_unsharded_param", "fully_shard: gathered parameters")
PARAM_LEFT = Attribute(_PARAM, "_sharded_post_forward_param", "fully_shard: reshard_after_forward=int")
PARAM_HOME = Attribute(_PARAM, "_module_info", "fully_shard: whose parameter it is")
PARAM_SPEC = Attribute(_PARAM, "_unsharded_dtensor_spec", "fully_shard beside tensor_parallel", since="2.12")
PARAM_SPEC_BEFORE = Attribute(
    _PARAM, "_tp_spec", "fully_shard beside tensor_parallel", until="2.12", instead="_unsharded_dtensor_spec"
)
MESH_SHARDS = Attribute(f"{_FSDP}_fsdp_common:FSDPMeshInfo", "shard_mesh_size", "fully_shard: does a unit communicate")
chunk = Private(f"{_FSDP}_fsdp_param", "_chunk_with_empty", "a rehearsal")

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
send_object = Private(_C10D, "_object_to_tensor", "a rehearsal")
use_group = Private(_C10D, "_update_default_pg", "a rehearsal")
forget_group = Private(_C10D, "_unregister_process_group", "a rehearsal")
TAGGED_GROUPS = Attribute(_C10D, "_tags_to_pg", "a rehearsal")
GROUP_TABLES = tuple(
    Attribute(_C10D, name, "a rehearsal")
    for name in ("_pg_names", "_pg_map", "_pg_group_ranks", "_pg_backend_config", "_pg_to_tag")
)
GROUP_NAMES = GROUP_TABLES[0]
BACKENDS = Attribute("torch.distributed:Backend", "_plugins", "a rehearsal")
NAME_GROUP = Attribute(_PG, "_set_group_name", "a rehearsal")
GATHER_ON_GROUP = Attribute(_PG, "_allgather_base", "a rehearsal")
REDUCE_ON_GROUP = Attribute(_PG, "_reduce_scatter_base", "a rehearsal")
MESSAGES_BEGUN = Attribute(_PG, "_get_sequence_number_for_group", "which rank is behind")
GROUP_NAMER = Attribute(_C10D, "_process_group_name", "sub-contexts: the same name on all ranks")
BACKEND_OF = Attribute(_PG, "_get_backend", "sub-contexts")
DEVICE_TYPES = Attribute(_PG, "_device_types", "adopt: the timeout")
SET_TIMEOUT = Attribute("torch._C._distributed_c10d:ProcessGroupGloo", "_set_default_timeout", "elastic jobs")
OPTIONS_TIMEOUT = Attribute("torch._C._distributed_c10d:Backend.Options", "_timeout", "adopt: the timeout")

# -- the launcher ----------------------------------------------------------------------------------------------

_ELASTIC = "torch.distributed.elastic."
_MEETING = f"{_ELASTIC}rendezvous.dynamic_rendezvous:DynamicRendezvousHandler"
_STARTED = f"{_ELASTIC}multiprocessing.api:PContext"
_RANKS = f"{_ELASTIC}multiprocessing.api:MultiprocessContext"
START = Attribute(_STARTED, "_start", "launch: signals while ranks are started")
CLOSE = Attribute(_STARTED, "_close", "launch: ranks that are stopped")
POLL = Attribute(_RANKS, "_poll", "launch: ranks that end early")
PROCESSES = Attribute(_RANKS, "_pc", "launch: ranks that end early")
VALUES = Attribute(_RANKS, "_return_values", "launch: ranks that end early")
QUEUES = Attribute(_RANKS, "_ret_vals", "launch: ranks that end early")
RANKS_STORE = Attribute(
    f"{_ELASTIC}rendezvous.static_tcp_rendezvous:StaticTCPRendezvous", "_store", "launch: which address listens"
)
RANKS_SERVE = Attribute(_MEETING, "_create_tcp_store_server", "launch: which address listens")
NODES_MET = Attribute(_MEETING, "_state_holder", "launch: how often nodes have met")
_FUNCTIONAL = "torch.distributed._functional_collectives"
all_gather_single = Private(_FUNCTIONAL, "all_gather_single", "context_parallel", since="2.13")
all_gather_tensor = Private(_FUNCTIONAL, "all_gather_tensor", "context_parallel, before that")
reduce_scatter_single = Private(_FUNCTIONAL, "reduce_scatter_single", "context_parallel", since="2.13")
reduce_scatter_tensor = Private(_FUNCTIONAL, "reduce_scatter_tensor", "context_parallel, before that")
all_to_all = Private(_FUNCTIONAL, "all_to_all_single", "context_parallel")
wait_for = Private(_FUNCTIONAL, "wait_tensor", "context_parallel")
functional_all_reduce = Private("torch:ops._c10d_functional", "all_reduce", "probes: is anything sent")

# -- DTensor and device meshes ---------------------------------------------------------------------------------

_MESH = "torch.distributed.device_mesh"
_SHARDS = "torch.distributed.tensor"
_DTENSOR = f"{_SHARDS}:DTensor"
_DISPATCHER = f"{_SHARDS}._dispatch:OpDispatcher"
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
strided_shard = Private(f"{_SHARDS}.placement_types", "_StridedShard", "fully_shard beside tensor_parallel")
block_of = Private(f"{_SHARDS}._utils", "compute_local_shape_and_global_offset", "checkpoints of shards")
propagate = Private(f"{_SHARDS}._sharding_prop:ShardingPropagator", "_propagate_tensor_meta_non_cached", "a rehearsal")
DISTRIBUTED = Attribute(f"{_SHARDS}._api:distribute_module", "_distribute_module_applied", "undo of tensor_parallel")
clear_propagation = Private("torch._C", "_clear_DTensor_sharding_propagator_cache", "the end of a context", "2.13")
JOIN_MESHES = Attribute(f"{_MESH}:DeviceMesh", "_concatenate", "zero_partition on hybrid meshes", since="2.10")
mesh_resources = Private(_MESH, "_mesh_resources", "the same, before that")

# -- loaders ---------------------------------------------------------------------------------------------------

_LOADER = "torch.utils.data.dataloader"
base_iterator = Private(_LOADER, "_BaseDataLoaderIter", "shard_data")
single_iterator = Private(_LOADER, "_SingleProcessDataLoaderIter", "shard_data")
worker_iterator = Private(_LOADER, "_MultiProcessingDataLoaderIter", "shard_data")
LOADER_ITERATES = Attribute(f"{_LOADER}:DataLoader", "_get_iterator", "shard_data")
LOADER_ITERATOR = Attribute(f"{_LOADER}:DataLoader", "_iterator", "shard_data: workers that stay")
LENGTH_CALLED = Attribute(f"{_LOADER}:_BaseDataLoaderIter", "_IterableDataset_len_called", "shard_data")
RESET = Attribute(f"{_LOADER}:_BaseDataLoaderIter", "_reset", "shard_data: workers that stay")
NEXT_DATA = Attribute(f"{_LOADER}:_BaseDataLoaderIter", "_next_data", "shard_data")
try_get = Private(f"{_LOADER}:_MultiProcessingDataLoaderIter", "_try_get_data", "a rehearsal")
worker_loop = Private("torch.utils.data._utils.worker", "_worker_loop", "a rehearsal")
worker_info = Private("torch.utils.data._utils.worker", "_worker_info", "shard_data: what workers read is the same")

# -- dispatch and fake tensors ---------------------------------------------------------------------------------

dispatch_mode = Private("torch.utils._python_dispatch", "TorchDispatchMode", "probes; a rehearsal")
without_modes = Private("torch.utils._python_dispatch", "_disable_current_modes", "recompute; a rehearsal")
tree = Private("torch.utils", "_pytree", "nested values as torch sees them")
fake_tensor = Private("torch._subclasses.fake_tensor", "FakeTensor", "a rehearsal")
fake_mode = Private("torch._subclasses.fake_tensor", "FakeTensorMode", "a rehearsal")
active_fake_mode = Private("torch._guards", "active_fake_mode", "a rehearsal")
without_fakes = Private("torch._subclasses.fake_tensor", "unset_fake_temporarily", "a rehearsal")
op_packet = Private("torch._ops", "OpOverloadPacket", "recompute(save=...)")
op_overload = Private("torch._ops", "OpOverload", "recompute(save=...)")
higher_order_op = Private("torch._ops", "HigherOrderOperator", "recompute(save=...)")
op_has_kernel = Private("torch._C", "_dispatch_has_kernel", "recompute(save=...)")
DECOMPOSED = Private("torch._C:DispatchKey", "CompositeImplicitAutograd", "recompute(save=...)")
OVERLOAD = Attribute("torch._ops:OpOverload", "_overloadname", "recompute(save=...)")
ATTENTION_OPS = tuple(
    Private("torch:ops.aten", f"_scaled_dot_product_{name}", "recompute(save=['attention'])")
    for name in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
        "attention_math_for_mps",
    )
)
SCALED_PRODUCT_OP = Private("torch:ops.aten", "_scaled_mm", "recompute(save=['matmul'])")
FOREACH_OPS = tuple(
    Private("torch:ops.aten", f"_foreach_{name}_", "zero_partition: gradients in pieces")
    for name in ("zero", "mul", "div")
)
unknown_value = Private("torch._subclasses.fake_tensor", "DataDependentOutputException", "a rehearsal")
unknown_size = Private("torch._subclasses.fake_tensor", "DynamicOutputShapeException", "a rehearsal")
current_device = Private("torch.utils._device", "CURRENT_DEVICE", "a rehearsal")
parse_to = Private("torch._C._nn", "_parse_to", "a rehearsal: Module.to")
schema = Attribute("torch._ops:OpOverload", "_schema", "probes; a rehearsal")
wait = Private("torch:ops._c10d_functional", "wait_tensor", "a rehearsal beside a real run")
FUNCTIONAL_MESSAGES = (  # one operation of each namespace
    wait,
    Private("torch:ops._c10d_functional_autograd", "all_gather_into_tensor", "a rehearsal"),
    Private("torch:ops._dtensor", "shard_dim_alltoall", "a rehearsal"),
)
GATHER = Attribute("torch:ops.c10d", "_allgather_base_", "a rehearsal")
REDUCE_SCATTER = Attribute("torch:ops.c10d", "_reduce_scatter_base_", "a rehearsal")
CTC_LOSS = Attribute("torch:ops.aten", "_ctc_loss", "a rehearsal")
PACK_SEQUENCE = Attribute("torch:ops.aten", "_pack_padded_sequence", "a rehearsal")
grouped_mm = Private("torch:ops.aten", "_grouped_mm", "a rehearsal")

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
linear_losses = tuple(
    Private("torch.nn.modules.linear_cross_entropy", name, "linear_cross_entropy of sharded heads", since="2.13")
    for name in ("_linear_cross_entropy_batch_chunked", "_linear_cross_entropy_batch_chunked_no_reduction")
)
check_later = Private("torch", "_assert_async", "vocab_cross_entropy")
scaled_product = Private("torch", "_scaled_mm", "with_precision: fp8")
