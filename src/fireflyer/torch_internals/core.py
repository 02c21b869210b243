"""Private names of torch's tensors, autograd, dispatcher, compiler and modules.

"Instead" names what this project plans to use if torch removes the entry.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn, overrides
from torch._C._dynamo import eval_frame
from torch._functorch import eager_transforms, pyfunctorch
from torch._functorch import vmap as batching
from torch.autograd import Variable, forward_ad
from torch.utils import _python_dispatch, _pytree

_C: Any = torch._C

# Tensors

DisableTorchFunctionSubclass = _C.DisableTorchFunctionSubclass
"""Context in which a read of a parameter does not wait for the parameter's deferred step.

Instead: `torch.Tensor.__torch_function__`, which enters this context."""

storage_uses = _C._storage_Use_Count
"""Counts the references to a storage, given its `_cdata`; finds aliases of a parameter's memory.

Instead: treat every parameter as shared, so that deferred steps are made at once."""

PRIVATE_READERS: tuple[tuple[Any, str], ...] = (
    (torch.Tensor, "_make_subclass"),
    (torch.Tensor, "_make_wrapper_subclass"),
    (eager_transforms, "_wrap_for_grad"),
    (eager_transforms, "_wrap_functional_tensor"),
    (batching, "_add_batch_dim"),
)
"""Owners and names of functions that read a tensor without its `__torch_function__`.

Instead: the functions by which torch's next version wraps tensors for `torch.func`."""

ScriptMethod = _C.ScriptMethod
"""Class of a scripted module's methods, which read parameters without a torch function.

Instead: refuse scripted modules."""

log_softmax_backward_out = torch.ops.aten._log_softmax_backward_data.out
"""Writes the gradient of log-softmax into given memory.

Instead: `logits.exp()` and the targets' shares, in two passes."""

BatchNorm = nn.modules.batchnorm._BatchNorm
"""Common base of the batch norms of all dimensions. Instead: the three public classes."""

pytree = _pytree
"""Nested containers of tensors. Instead: `torch.utils.pytree`, once torch publishes it."""

# Autograd

queue_callback = Variable._execution_engine.queue_callback
"""Calls a function at the end of the running backward, as torch's DDP and FSDP do.

Instead: hooks on the loss's `grad_fn` and a count of the parameters that it reaches."""

current_graph_task_id = _C._current_graph_task_id
"""Returns the number of the running backward, -1 outside; shows that a backward failed half way.

Instead: a flag that `queue_callback` resets."""

preserve_versions = torch.autograd._unsafe_preserve_version_counter
"""Context in which writes leave the versions of tensors unchanged; for buffers between forwards.

Instead: write through `buffer.data`, which has a version of its own."""

saved_tensor_hooks = _C._autograd._top_saved_tensors_default_hooks
"""Returns the innermost hooks of saved tensors.

Activation checkpointing must get tensors, not recipes.

Instead: attach no recipes while any `saved_tensors_hooks` is open."""

profiler_enabled = _C._autograd._profiler_enabled
"""Returns True while torch's profiler records. Instead: `record_function` in every call."""


def is_transformed() -> bool:
    """Returns True in traces, functorch and forward-mode AD.

    Instead of the two private values: attach recipes only inside an `autograd.Function`.
    """
    return (
        torch.compiler.is_compiling()
        or _C._functorch.peek_interpreter_stack() is not None
        or torch.jit.is_tracing()
        or forward_ad._current_level >= 0
    )


# State of a thread

dispatch_includes = _C._dispatch_tls_local_include_set
"""Returns the dispatch keys that this thread includes.

Instead of this entry and the next two: make deferred steps in a thread of their own."""

dispatch_excludes = _C._dispatch_tls_local_exclude_set
"""Returns the dispatch keys that this thread excludes."""

ForceDispatchKeyGuard = _C._ForceDispatchKeyGuard
"""Context that sets the included and excluded dispatch keys."""

InferenceMode = _C._InferenceMode
"""Inference mode without the cost of its public wrapper. Instead: `torch.inference_mode(False)`."""

disable_current_modes = _python_dispatch._disable_current_modes
"""Context that suspends dispatch modes. Instead: deferred steps in a thread of their own."""

temporarily_clear_interpreter_stack = pyfunctorch.temporarily_clear_interpreter_stack
"""Context that suspends functorch. Instead: deferred steps in a thread of their own."""

function_modes = _C._len_torch_function_stack
"""Returns the number of active torch function modes.

Instead of this entry and the next three: deferred steps in a thread of their own."""

pop_function_mode: Any = overrides._pop_mode
"""Ends the innermost torch function mode, and returns it."""

push_function_mode: Any = overrides._push_mode
"""Makes a torch function mode the innermost one."""

default_device: Any = torch._GLOBAL_DEVICE_CONTEXT
"""Holds the mode `device_context` of `torch.set_default_device`."""

tracing_state = _C._get_tracing_state
"""Returns the state of `torch.jit.trace`. Instead: refuse to trace while parameters are pending."""

set_tracing_state = _C._set_tracing_state
"""Sets the state that `tracing_state` returns."""

# Compiler

eval_frame_callback = eval_frame.get_eval_frame_callback
"""Returns torch.compile's callback; None or False: frames run uncompiled.

Instead: settle deferred steps before each forward of a model with compiled parts."""

set_code_exec_strategy = eval_frame.set_code_exec_strategy
"""Tells the compiler what to do with a code object and its callees.

Instead of this entry and the next two: `torch.compiler.disable`, which costs a call of its own."""

FrameAction = eval_frame._FrameAction
"""Names what the compiler may do with a frame."""

FrameExecStrategy = eval_frame._FrameExecStrategy
"""Pair of `FrameAction`s: of the frame and of its callees."""


@contextlib.contextmanager
def not_compiling() -> Iterator[None]:
    """Makes `torch.compiler.is_compiling` False: optimizers compute differently while it is True.

    Instead: deferred steps in a thread of their own.
    """
    flags: Any = torch.compiler
    before = flags._is_compiling_flag, flags._is_exporting_flag
    flags._is_compiling_flag = flags._is_exporting_flag = False
    try:
        yield
    finally:
        flags._is_compiling_flag, flags._is_exporting_flag = before
