"""Members that only the library itself uses, though no underscore says so: the site hides them.

Each stands under the class that defines it. An entry goes when its member is renamed or deleted.
"""

from __future__ import annotations

INTERNAL = {
    "opfuser.basic.basic_linear.BasicLinear": (
        "hand_over hand_over_all operands weight_grad weight_grad_dtype weight_grads"
    ),
    "opfuser.basic.bias.Bias": "gradients operand",
    "opfuser.basic.cross_entropy.CrossEntropy": "check_inputs",
    "opfuser.basic.dropout.Dropout": "Settings",
    "opfuser.basic.embedding.Embedding": "Settings",
    "opfuser.basic.grouped_linear.GroupedLinear": (
        "backward_by forward_by input_grad parameter_grads wants_weights"
    ),
    "opfuser.basic.permute.Permute": "recompute",
    "opfuser.basic.qk_norm.QKNorm": "check_input gradients heads normalize",
    "opfuser.basic.rotary_embedding.RotaryEmbedding": (
        "Saved Settings check_input given heads rotation settings_of_call"
    ),
    "opfuser.fuser.OperationFuser": "parameters_for_tracing plan_for_tracing planned stand",
    "opfuser.core.fusion.Fusion": "refusal scan",
    "opfuser.core.fusion.QuantizedEdge": "behind",
    "opfuser.core.fusion.Requires": "missing",
    "opfuser.registry.configuration.FusionConfig": "by_fusion followed_by globs names",
    "opfuser.linear.Linear": "pattern_parts",
    "opfuser.merged_linear.MergedLinear": "own_forward pattern_parts",
    "opfuser.op.BasicOperation": "share_parameters_with",
    "opfuser.core.op_base.basic.BasicOperation": (
        "check_keywords gemm_choices parameter_slots plan_note quantized_refusal"
    ),
    "opfuser.core.op_base.fused.FusedOperation": "is_compound",
    "opfuser.core.op_base.fusible.FusibleOperation": "own_forward quantized_edges quantized_ops",
    "opfuser.sequence.module_sequence.ModuleSequence": (
        "connect joins_outer overrides_forward own_channels planned_groups resolved_routes"
    ),
    "opfuser.registry.handles.FusionHandle": "call disabled_by requires setting switched",
    "opfuser.attention.rope.RopeScaling": "check_pairs counted_length",
}
