"""Where PyTorch keeps its hooks, for the census."""

__all__ = ["GLOBAL_MODULE", "GLOBAL_OPTIMIZER", "ON_MODULE", "ON_OPTIMIZER", "ON_TENSOR"]

# The attribute, PyTorch's word for the kind, and the tables of its options.
ON_MODULE = {
    "_forward_pre_hooks": ("forward pre-hook", {"with_kwargs": "_forward_pre_hooks_with_kwargs"}),
    "_forward_hooks": (
        "forward hook",
        {"with_kwargs": "_forward_hooks_with_kwargs", "always_call": "_forward_hooks_always_called"},
    ),
    "_backward_pre_hooks": ("full backward pre-hook", {}),
    "_backward_hooks": ("full backward hook", {}),
    "_state_dict_pre_hooks": ("state_dict pre-hook", {}),
    "_state_dict_hooks": ("state_dict hook", {}),
    "_load_state_dict_pre_hooks": ("load_state_dict pre-hook", {}),
    "_load_state_dict_post_hooks": ("load_state_dict post-hook", {}),
}
ON_TENSOR = {
    "_backward_hooks": ("tensor hook", {}),
    "_post_accumulate_grad_hooks": ("post-accumulate-grad hook", {}),
}
ON_OPTIMIZER = {
    "_optimizer_step_pre_hooks": ("optimizer step pre-hook", {}),
    "_optimizer_step_post_hooks": ("optimizer step post-hook", {}),
    "_optimizer_state_dict_pre_hooks": ("state_dict pre-hook", {}),
    "_optimizer_state_dict_post_hooks": ("state_dict hook", {}),
    "_optimizer_load_state_dict_pre_hooks": ("load_state_dict pre-hook", {}),
    "_optimizer_load_state_dict_post_hooks": ("load_state_dict post-hook", {}),
}
GLOBAL_MODULE = {
    "_global_forward_pre_hooks": ("forward pre-hook", {}),
    "_global_forward_hooks": (
        "forward hook",
        {
            "with_kwargs": "_global_forward_hooks_with_kwargs",
            "always_call": "_global_forward_hooks_always_called",
        },
    ),
    "_global_backward_pre_hooks": ("full backward pre-hook", {}),
    "_global_backward_hooks": ("full backward hook", {}),
    "_global_module_registration_hooks": ("module registration hook", {}),
    "_global_parameter_registration_hooks": ("parameter registration hook", {}),
    "_global_buffer_registration_hooks": ("buffer registration hook", {}),
}
GLOBAL_OPTIMIZER = {
    "_global_optimizer_pre_hooks": ("optimizer step pre-hook", {}),
    "_global_optimizer_post_hooks": ("optimizer step post-hook", {}),
}
