"""What weft uses of DeepSpeed that is not public: names with an underscore, and attributes that it replaces or empties.

See `weft.private_names`. A test compares this file with the installed DeepSpeed.
"""

from __future__ import annotations

import importlib.metadata
from functools import partial

from weft import private_names

_DEEPSPEED = private_names.SupportedLibrary("deepspeed", lambda: importlib.metadata.version("deepspeed"), ("0.19.8",))
Private = partial(private_names.Private, _DEEPSPEED)
Attribute = partial(private_names.Attribute, _DEEPSPEED)

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_INIT = "deepspeed.runtime.zero.partition_parameters:Init"
_STAGES_12 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_LINKS = "deepspeed.utils.mixed_precision_linkage:_init_lp_to_hp_mapping"

# -- the process -------------------------------------------------------------------------------------------------

operations = Private("deepspeed.ops", "__compatible_ops__", "zero_partition: nothing is compiled")
modules_running = Private(
    "deepspeed.runtime.zero.parameter_offload", "FWD_MODULE_STACK", "zero_partition, stage 3: forward passes"
)
mpu = Private("deepspeed.utils.groups", "mpu", "zero_partition: what is left behind is taken back")
forget_names = Private(
    "deepspeed.utils.debug", "debug_clear_module_and_param_names", "zero_partition: models are freed"
)
COMPILER_FLAGS = Attribute("deepspeed.ops.op_builder.builder:OpBuilder", "cxx_args", "offloading to a disk")

# -- engines ---------------------------------------------------------------------------------------------------

broadcast = Private(_ENGINE, "_broadcast_model", "zero_partition: parameters are equal already")
REDUCES_IN_BACKWARD = Attribute(_ENGINE, "enable_backward_allreduce", "zero_partition: weft says when")
BEFORE_FORWARD = Attribute(_ENGINE, "module_forward_pre_hook", "zero_partition: hooks of weft instead")
AFTER_FORWARD = Attribute(_ENGINE, "module_forward_post_hook", "zero_partition: hooks of weft instead")
BEGIN_FORWARD = Attribute(_ENGINE, "_forward_prologue", "zero_partition: forward passes")
END_FORWARD = Attribute(_ENGINE, "_forward_epilogue", "zero_partition: forward passes")

# -- parameters ------------------------------------------------------------------------------------------------

cut = Private(_INIT, "_zero_init_param", "zero_partition: parameters are equal already")
CUT_ALL = Attribute(_INIT, "_convert_to_zero_parameters", "zero_partition of modules on meta")
CONVERT = Attribute(_INIT, "_convert_to_deepspeed_param", "zero_partition, stage 3")
ID = Attribute(_INIT, "ds_id", "zero_partition, stage 3: what is cut")
NUMEL = Attribute(_INIT, "ds_numel", "zero_partition, stage 3: sizes")
SHAPE = Attribute(_INIT, "ds_shape", "zero_partition, stage 3: shapes")
PIECE = Attribute(_INIT, "ds_tensor", "zero_partition, stage 3: weights")
ACCUMULATED = Attribute(_STAGES_12, "grad_accum", "zero_partition: gradients are forgotten")
HUNG_ON = (  # on parameters in stages 1 and 2
    Attribute(_STAGES_12, "_zero_optimizer", "zero_partition: modules can be copied"),
    Attribute(_STAGES_12, "load_hp_checkpoint_state", "zero_partition: modules can be copied"),
    *(
        Attribute(_LINKS, name, "zero_partition: modules can be copied")
        for name in (
            "_hp_mapping",
            "_dp_group",
            "get_full_hp_param",
            "get_full_hp_grad",
            "set_full_hp_param",
            "set_full_hp_grad",
        )
    ),
)

# -- optimizers of stages 1 and 2 --------------------------------------------------------------------------------

HOOKS = Attribute(_STAGES_12, "_grad_acc_hooks", "zero_partition: hooks of weft instead")
MICRO_STEP = Attribute(_STAGES_12, "micro_step_id", "zero_partition: gradients are added")
AVERAGED = Attribute(_STAGES_12, "averaged_gradients", "zero_partition: gradients are dropped")
BUCKETS = Attribute(_STAGES_12, "ipg_buckets", "zero_partition: a backward pass that was torn")
REDUCED = Attribute(_STAGES_12, "params_already_reduced", "zero_partition: a backward pass that was torn")
LARGE = Attribute(_STAGES_12, "extra_large_param_to_reduce", "zero_partition: a backward pass that was torn")
RELEASE_BUCKETS = Attribute(_STAGES_12, "_release_ipg_buffers", "zero_partition: a backward pass that was torn")
GRADIENTS = Attribute(_STAGES_12, "all_grad_tensors", "zero_partition: where gradients lie")
GRADIENTS_ON_CPU = Attribute(_STAGES_12, "accumulated_grads_in_cpu", "zero_partition: where gradients lie")
IS_COMPACT = Attribute(_STAGES_12, "_use_compact_grad_partition_buffer", "zero_partition: where gradients lie")
COMPACT_PIECE = Attribute(_STAGES_12, "_get_compact_grad_partition_slice", "zero_partition: where gradients lie")
ON_CPU = Attribute(_STAGES_12, "_offload_accumulated_param_ids", "zero_partition: gradients are dropped")
ACCUMULATE = Attribute(_STAGES_12, "_fill_param_grad_accum_attribute", "zero_partition: gradients are handed over")
IS_READY = Attribute(_STAGES_12, "ready_for_gradients", "zero_partition: the end of a backward pass")
IS_LINKED = Attribute(_STAGES_12, "_hp_optimizer_states_linked", "zero_partition: modules can be copied")
WEIGHTS = Attribute(_STAGES_12, "single_partition_of_fp32_groups", "zero_partition: weights that are stepped on")
PARTS = Attribute(_STAGES_12, "parallel_partitioned_bit16_groups", "zero_partition: weights of modules")
WHOLE = Attribute(_STAGES_12, "bit16_groups_flat", "zero_partition: weights of modules")

# -- optimizers of stage 3; of the names above it has HOOKS, MICRO_STEP, AVERAGED, BUCKETS and REDUCED ---------------

OF_STAGE_3 = tuple(
    Attribute(_STAGE_3, name, "zero_partition, stage 3")
    for name in ("_grad_acc_hooks", "micro_step_id", "averaged_gradients", "ipg_buckets", "params_already_reduced")
)
RANK_OF = Attribute(_STAGE_3, "_get_param_partition_rank", "zero_partition, stage 3: where weights lie")
FLAT_WEIGHTS = Attribute(_STAGE_3, "fp32_partitioned_groups_flat", "zero_partition, stage 3: where weights lie")
FLAT_GRADIENTS = Attribute(_STAGE_3, "grad_partitions_flat_buffer", "zero_partition, stage 3: where gradients lie")
AT_BOUNDARY = Attribute(_STAGE_3, "_offload_boundary_param_ids", "zero_partition, stage 3: gradients are dropped")
OFFLOAD = Attribute(_STAGE_3, "_offload_grad_partition_at_boundary", "zero_partition: gradients beside a disk")
SWAPPER = Attribute(_STAGE_3, "optimizer_swapper", "zero_partition: gradients beside a disk")
IS_SWAPPED = Attribute(_STAGE_3, "_swappable_optimizer_subgroup", "zero_partition: state on a disk")
SWAP_IN = Attribute(_STAGE_3, "_optimizer_states_and_gradient_swap_in", "zero_partition: state on a disk")
SWAP_OUT = Attribute(_STAGE_3, "_optimizer_states_and_gradient_swap_out", "zero_partition: state on a disk")
RELEASE_SWAPPED = Attribute(_STAGE_3, "_release_swap_buffers", "zero_partition: state on a disk")
