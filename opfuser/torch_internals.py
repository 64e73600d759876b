"""What opfuser uses of torch, triton and flash-attn that is private or unstable there.

Nothing else in the library names it. A line each says why it is used, and what stands in where it
is gone: the public way if there is one, else an answer that is safe, such as that a transform is
under way, which costs time; else an error that says what is missing, once a feature needs it. All
names are those of torch 2.11, the oldest that is supported, unless their line says since when they
are there. They are bound at import, so that a call costs what it costs torch itself.

A few kinds of underscored names stand elsewhere, as they are private in spelling only:

- operators of ``torch.ops.aten`` and ``torch._foreach_*``: saved programs name them, which is why
  torch checks in its own tests that their schemas stay compatible;
- ``Tensor._version``, ``Tensor._base`` and ``torch.utils._python_dispatch.TorchDispatchMode``: the
  documentation of torch explains them;
- attributes and methods of ``nn.Module`` and ``Optimizer`` on which subclasses and every library
  around torch rely: ``_parameters``, ``_load_from_state_dict``, hooks and the like.
"""

# Longer than 500 lines: all that is private elsewhere stands in one place, on purpose.

from __future__ import annotations

import copy
import ctypes
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from itertools import count
from operator import attrgetter
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, profiler
from torch.nn.utils import parametrize

from .errors import TorchVersionError

F = TypeVar("F", bound=Callable[..., Any])

TESTED = {"torch": "2.11 to 2.15", "triton": "3.6 to 3.9"}
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
CLAMP_PASSES_AT_LIMITS = VERSION < (2, 14)
"""Whether the gradient of ``torch.clamp`` is 1 where x is at a limit; since torch 2.14 it is 0."""
lacking: list[str] = []
"""Names that the installed torch does not have."""


def _find(name: str, instead: Any, *, built: bool = True) -> Any:
    """What has a name, written as ``"module:attribute"``, or what stands in for it.

    Args:
        built: whether this build of torch should have it.
    """
    module, _, attribute = name.partition(":")
    try:
        return attrgetter(attribute)(import_module(module))
    except (ImportError, AttributeError):
        if built:
            lacking.append(name.replace(":", "."))
        return instead


def _needed(name: str, by: str, *, built: bool = True) -> Any:
    """What has a name; instead, an error says that ``by`` needs it."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise TorchVersionError.explained(
            f"{by} needs {name.replace(':', '.')}",
            received=f"torch {torch.__version__}, which does not have it",
            remedy=f"Install a torch from {TESTED['torch']}, or do without",
        )

    return _find(name, refuse, built=built)


OLDEST = 2, 11
if VERSION < OLDEST:
    raise TorchVersionError.explained(
        f"opfuser needs torch {OLDEST[0]}.{OLDEST[1]} or later",
        received=f"torch {torch.__version__}",
        remedy=f"Run pip install --upgrade 'torch>={OLDEST[0]}.{OLDEST[1]}'",
    )


def _true(*args: Any) -> bool:
    return True


def _none(*args: Any) -> None:
    return None


# Autograd.

_IN_CHECKPOINT = "Quantized compute within a checkpoint"
_REENTRY = "Accumulating gradients within a checkpoint"

# Which backward pass runs in this thread, or -1. Instead: one does, in recomputation alone.
graph_task: Callable[[], int] = _find("torch:_C._current_graph_task_id", lambda: 0)
# The same, for who counts what a pass has written.
numbered_graph_task: Callable[[], int] = _needed(
    "torch:_C._current_graph_task_id", "Accumulating gradients"
)
# The node that runs. Instead: none, as in compiled autograd, which nobody can ask either.
current_node: Callable[[], Any] = _find("torch:_C._current_autograd_node", _none)
# Whether a pass will come to a node; torch.autograd.grad leaves some out.
will_execute: Callable[[Any], bool] = _needed(
    "torch:_C._will_engine_execute_node", "Accumulating gradients"
)
# Whether a pass may be followed by another one over the same graph. Instead: it may.
keeps_graph: Callable[[], bool] = _find(
    "torch:_C._autograd._get_current_graph_task_keep_graph", _true
)
# The innermost hooks of saved tensors: a checkpoint's among them. Instead: hooks of nobody.
saved_tensors_hooks: Callable[[bool], Any] = _find(
    "torch:_C._autograd._top_saved_tensors_default_hooks", lambda ignore: (_none, _none)
)
# The same, for who looks at those around them too, and takes them off for a moment.
all_saved_tensors_hooks: Callable[[bool], Any] = _needed(
    "torch:_C._autograd._top_saved_tensors_default_hooks", _IN_CHECKPOINT
)
pop_saved_tensors_hooks: Callable[[], None] = _needed(
    "torch:_C._autograd._pop_saved_tensors_default_hooks", _IN_CHECKPOINT
)
push_saved_tensors_hooks: Callable[..., None] = _needed(
    "torch:_C._autograd._push_saved_tensors_default_hooks", _IN_CHECKPOINT
)
# Whether a node can release what it saved while its backward runs. Otherwise the tensors of a whole
# group stay until its last gradient is computed.
CAN_CLEAR: bool = _find("torch:_C._FunctionBase.maybe_clear_saved_tensors", None) is not None
# torch.set_grad_enabled without a microsecond of its context manager.
set_grad_enabled: Callable[[bool], Any] = _find(
    "torch:_C._set_grad_enabled", torch.set_grad_enabled
)

# Thread-local state that autograd hands on to the threads of a backward pass.
_stash: Callable[[str, Any], None] = _needed("torch:_C._stash_obj_in_tls", _REENTRY)
has_stashed: Callable[[str], bool] = _needed("torch:_C._is_key_in_tls", _REENTRY)
stashed: Callable[[str], Any] = _needed("torch:_C._get_obj_in_tls", _REENTRY)

_add_reference = ctypes.pythonapi.Py_IncRef
_add_reference.argtypes = [ctypes.py_object]
_add_reference.restype = None


def stash(key: str, value: object) -> None:
    """Puts ``value`` under ``key`` into the thread-local state of ATen."""
    if _takes_a_reference():
        _add_reference(value)
    _stash(key, value)


@cache
def _takes_a_reference() -> bool:
    """Whether torch takes over a reference of the caller, as 2.11 does, in place of adding one."""
    probe = object()
    _add_reference(probe)
    before = sys.getrefcount(probe)
    _stash("opfuser: probe", probe)
    return sys.getrefcount(probe) == before


# Modes and transforms.

# Whether torch.func transforms what runs. Instead: yes; nothing is overwritten, no kernel runs.
transforms_active: Callable[[], bool] = _find("torch:_C._are_functorch_transforms_active", _true)
# Whether a gradient is a batch, of torch.vmap or of is_grads_batched. Instead: as above, and no.
is_batched: Callable[[Tensor], bool] = _find(
    "torch:_C._functorch.is_batchedtensor", lambda t: transforms_active()
)
is_legacy_batched: Callable[[Tensor], bool] = _find(
    "torch:_C._functorch.is_legacy_batchedtensor", lambda t: False
)
# How many modes see all calls. Instead: one, so that every call is as torch makes it.
dispatch_modes: Callable[[], int] = _find("torch:_C._len_torch_dispatch_stack", lambda: 1)
function_modes: Callable[[], int] = _find("torch:_C._len_torch_function_stack", lambda: 1)
# These modes, the outermost first. Instead: none is known.
dispatch_mode_stack: Callable[[], list[object]] = _find(
    "torch.utils._python_dispatch:_get_current_dispatch_mode_stack", list
)
function_mode_at: Callable[[int], object] = _find(
    "torch:_C._get_function_stack_at", lambda number: None
)
# The mode of a default device, which sees all calls and changes factories alone. Instead: no mode.
DeviceContext: type = _find("torch.utils._device:DeviceContext", type("_NoMode", (), {}))
# Takes modes off, to compute with real tensors while something traces.
without_modes: Callable[[], Any] = _needed(
    "torch.utils._python_dispatch:_disable_current_modes", "Reading a forward or tracing attention"
)
without_innermost_mode: Callable[[], Any] = _needed(
    "torch.overrides:_pop_mode_temporarily", "Compiling within a recorded call"
)
# Calls that nobody notes, not even subclasses; torch's documentation names the second one.
DisableTorchFunction: Any = _needed("torch:_C.DisableTorchFunction", "Recording calls")
DisableTorchFunctionSubclass: Any = _needed(
    "torch:_C.DisableTorchFunctionSubclass", "Logits that are not computed"
)
# Autocast of any device, in one question.
any_autocast: Callable[[], bool] = _find(
    "torch:_C._is_any_autocast_enabled",
    lambda: torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
)
# Whether torch.jit.trace runs.
jit_traces: Callable[[], bool] = _find("torch:_C._is_tracing", torch.jit.is_tracing)  # type: ignore[attr-defined]
# Getters of what is set for a process, by which reading a forward knows them. Modes that a call is
# known by are none of them.
_ENDS = (
    "accumulation algorithms backend benchmark deterministic enabled order precision reduction "
    "tf32 threads"
).split()
_MODES = "autocast_cpu", "autocast_enabled", "is_grad", "torch_function"
SETTINGS = frozenset(
    function
    for name, function in vars(torch._C).items()
    if name.startswith(("_get_", "_is_", "get_", "is_"))
    and name.endswith(tuple(_ENDS))
    and not any(mode in name for mode in _MODES)
)


def is_private(function: Any) -> bool:
    """Whether a function is one in C that torch keeps to itself, and no mode is told of."""
    of_torch = getattr(function, "__self__", None) is torch._C and function is not set_grad_enabled
    return of_torch and function.__name__.startswith("_")


_find("torch.nn.utils.parametrize:_cache_enabled", None)


def caches_parametrizations() -> bool:
    """Whether torch.nn.utils.parametrize.cached is entered. Instead: it is."""
    return bool(getattr(parametrize, "_cache_enabled", True))


_find("torch.autograd.forward_ad:_current_level", None)
_find("torch.autograd.profiler:_is_profiler_enabled", None)


def in_forward_mode() -> bool:
    """Whether forward-mode derivatives are computed. Instead: they are, and nothing is recorded."""
    try:
        return forward_ad._current_level >= 0
    except AttributeError:
        return True


def is_profiled() -> bool:
    """Whether a profiler is on. Instead: none is, and profiles name no ranges."""
    try:
        return profiler._is_profiler_enabled
    except AttributeError:
        return False


# Memory and objects.

# The address of what counts references to memory, also of ``meta``. Instead: of the first byte.
storage_address: Callable[[Any], int] = _find(
    "torch:UntypedStorage._cdata.__get__", lambda storage: storage.data_ptr()
)
# References to tensors from C++, and to memory. Instead: always more, so that nothing is reused.
_more = count(1 << 40, 16)
use_count: Callable[[Tensor], int] = _find("torch:Tensor._use_count", lambda t: next(_more))
storage_use_count: Callable[[int], int] = _find(
    "torch:_C._storage_Use_Count", lambda a: next(_more)
)
# Whether autograd takes a tensor for a view.
is_view: Callable[[Tensor], bool] = _find("torch:Tensor._is_view", lambda t: t._base is not None)
# A tensor without contents.
make_wrapper_subclass: Any = _needed(
    "torch:Tensor._make_wrapper_subclass", "Logits that are not computed"
)
# What pickles of tensors call.
rebuild_tensor: Any = _needed("torch._utils:_rebuild_tensor_v2", "Reading a te state")
# The like of what autograd and torch.export compute with.
FakeTensorMode: Any = _needed("torch._subclasses.fake_tensor:FakeTensorMode", "Reading a forward")
FunctionalTensorMode: Any = _needed(
    "torch._subclasses.functional_tensor:FunctionalTensorMode", "torch.export"
)
dispatch_functionalize: Any = _needed(
    "torch._subclasses.functional_tensor:dispatch_functionalize", "torch.export"
)
# An overload of an operator. Instead: nothing is one.
OpOverload: Any = _find("torch._ops:OpOverload", type("_NoOverload", (), {}))
# Constants that torch.export may find in arguments. Instead: it finds them not.
register_constant: Callable[[type], None] = _find("torch.utils._pytree:register_constant", _none)


def memory_of(t: Tensor) -> int:
    """The address of what counts the references to the memory of ``t``."""
    return storage_address(t.untyped_storage())


def has_grad_hooks(t: Tensor) -> bool:
    """Whether hooks are to see the gradient of a tensor. Instead: there are some."""
    return bool(
        getattr(t, "_backward_hooks", True) or getattr(t, "_post_accumulate_grad_hooks", True)
    )


def schema_of(overload: Any) -> Any:
    """What an overload of an operator says of its arguments."""
    return overload._schema


def called_by(overload: Any) -> Any:
    """The function in C++ around which an overload is one in Python. Instead: the overload."""
    return getattr(overload, "_op", overload)


# CUDA: names that builds without it lack, or have without what is behind them.

_BUILT = torch.backends.cuda.is_built()
_cuda = partial(_find, built=_BUILT)
# Without the checks of the public functions, which take as long as the rest of a launch.
cuda_device: Callable[[], int] = _cuda("torch:_C._cuda_getDevice", torch.cuda.current_device)
cuda_stream: Callable[[int], int] = _cuda(
    "torch:_C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
cuda_captures: Callable[[], bool] = _cuda(
    "torch:_C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
# Whether the history of memory is recorded, which a replay would not tell. Instead: it is.
cuda_history: Callable[[], bool] = _cuda("torch:_C._cuda_isHistoryEnabled", _true)
# What a capture needs that failed, and one whose workspace is its own.
end_allocate_to_pool: Callable[..., None] = _needed(
    "torch:_C._cuda_endAllocateToPool", "Replaying launches", built=_BUILT
)
clear_cublas_workspaces: Callable[[], None] = _needed(
    "torch:_C._cuda_clearCublasWorkspaces", "Replaying launches", built=_BUILT
)
# The cuDNN that torch was built with, to name one that another package has brought.
# Instead: the one that is loaded.
cudnn_loaded: Callable[[], Any] = _cuda("torch:_C._cudnn.getRuntimeVersion", lambda: (0, 0, 0))
cudnn_built: Callable[[], Any] = _cuda("torch:_C._cudnn.getCompileVersion", cudnn_loaded)

# The grouped GEMM of fp8 codes, as it was measured; the public function is in front of a later one.
# Instead: None, and opfuser's own kernel multiplies.
scaled_grouped_mm: Callable[..., Tensor] | None = _find("torch:_scaled_grouped_mm", None)

# An operator of ATen, called as fast as by torch itself. Instead: by the way of all operators.
softmax_backward: Callable[..., Tensor] = _find(
    "torch:_softmax_backward_data", torch.ops.aten._softmax_backward_data
)
# The kernel of attention that torch would take. Instead: plain torch.
sdp_choice: Callable[..., int] = _find(
    "torch:_fused_sdp_choice", lambda *args, **kwargs: torch.nn.attention.SDPBackend.MATH.value
)
# Torch's own function for attention, which context_parallel replaces by another one.
scaled_dot_product_attention: Any = _find(
    "torch:_C._nn.scaled_dot_product_attention", nn.functional.scaled_dot_product_attention
)

_backends = torch.backends.cuda
# What decides which kernel of attention and which product torch takes; asked at every call.
# The order of kernels has no public getter. Instead: one that nobody changes.
_SDP: tuple[Callable[[], Any], ...] = (
    _find("torch:_C._get_flash_sdp_enabled", _backends.flash_sdp_enabled),
    _find("torch:_C._get_mem_efficient_sdp_enabled", _backends.mem_efficient_sdp_enabled),
    _find("torch:_C._get_math_sdp_enabled", _backends.math_sdp_enabled),
    _find("torch:_C._get_cudnn_sdp_enabled", _backends.cudnn_sdp_enabled),
    torch.are_deterministic_algorithms_enabled,
)
_sdp_order: Callable[[], Any] = _find("torch:_C._get_sdp_priority_order", tuple)
_matmul = _backends.matmul
_BLAS: tuple[Callable[[], Any], ...] = (
    # The older getter raises once the newer setter was used.
    partial(_find("torch:_C._get_fp32_precision_getter", _none), "cuda", "matmul"),
    _find(
        "torch:_C._get_cublas_allow_bf16_reduced_precision_reduction",
        lambda: str(_matmul.allow_bf16_reduced_precision_reduction),
    ),
    _find(
        "torch:_C._get_cublas_allow_fp16_reduced_precision_reduction",
        lambda: str(_matmul.allow_fp16_reduced_precision_reduction),
    ),
    _find("torch:_C._get_cublas_allow_fp16_accumulation", lambda: _matmul.allow_fp16_accumulation),
    _find("torch:_C._get_blas_preferred_backend", _backends.preferred_blas_library),
)


def attention_settings() -> tuple[Any, ...]:
    """What decides which kernel of attention torch takes."""
    return (*[read() for read in _SDP], *_sdp_order())


def product_settings() -> tuple[Any, ...]:
    """What decides how torch multiplies on a GPU."""
    return tuple([read() for read in _BLAS])


# torch.compile and torch.export.

# Found, it is the flag as it was at import.
_compiling_flag: Any = _needed("torch.compiler:_is_compiling_flag", "torch.compile")
_find("torch.compiler:_is_exporting_flag", None)


def exporting() -> bool:
    """Whether torch.export traces. Instead: the public answer.

    ``torch.compiler.is_exporting()`` is true in whatever Dynamo of torch 2.11 interprets.
    """
    return torch.compiler._is_exporting_flag


if "torch.compiler._is_exporting_flag" in lacking:
    exporting = torch.compiler.is_exporting


@contextmanager
def compiling(flag: bool = True) -> Iterator[None]:
    """What runs within it is traced, as code that Dynamo interprets is; or, without, is not.

    As torch.export does it; torch.compile itself does from 2.13 on.
    """
    if callable(_compiling_flag):
        _compiling_flag()
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = flag
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def constant_result(function: F) -> F:
    """What torch.compiler.assume_constant_result does, which would import the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def graph_of_dynamo() -> Any:
    """What Dynamo puts the graph into that it makes in this thread; None if it makes none."""
    translator: Any = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        return translator.InstructionTranslator.current_tx().output
    except AttributeError:
        return None


def compiler_is_off() -> bool:
    """Whether torch.compile is disabled; imports the compiler."""
    return bool(import_module("torch._dynamo").config.disable)


def mark_dynamic(t: Tensor, dim: int) -> None:
    """Says that a size may differ between calls of what is compiled; no error if it may not."""
    import_module("torch._dynamo").maybe_mark_dynamic(t, dim)


# Modules.

_call_impl: Any = _needed("torch.nn:Module._call_impl", "Observing the calls of modules")
_GLOBAL_HOOKS = "forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks"
# The dicts of hooks that all modules have. Instead: such a hook is there, and nothing is replaced.
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(
    _find(f"torch.nn.modules.module:_global_{kind}", {0: None}) for kind in _GLOBAL_HOOKS
)


@contextmanager
def modules_called_by(call: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Within it all modules are called by what ``call`` makes of torch's own way.

    Not of ``__call__``, by which fused operations know their own.
    """
    original: Any = getattr(nn.Module, "_call_impl", None) or _call_impl()
    nn.Module._call_impl = call(original)  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._call_impl = original  # type: ignore[method-assign]


# Triton and flash-attn.


def launcher_of(kernel: Any) -> tuple[Any, Any, tuple[Any, ...], bool] | None:
    """How a kernel of Triton is launched; None where that cannot be told.

    The launcher, the binary's function, what comes between it and the arguments of the kernel, and
    whether these come in a tuple. Where the launcher is a Python function around one in C, and has
    no memory to allocate, it hands on its arguments and constants of its own. Then those are kept,
    and the one in C is called. Instead: Triton's own ``kernel[grid](...)``.
    """
    if not hasattr(kernel, "packed_metadata"):
        return None
    run, metadata = kernel.run, kernel.packed_metadata
    plain = run, kernel.function, (metadata, None, None, None), False
    sizes = getattr(run, "global_scratch_size", 1), getattr(run, "profile_scratch_size", 1)
    if any(sizes) or not hasattr(run, "launch"):
        return plain
    handed_on: list[tuple[Any, ...]] = []
    outer = copy.copy(run)
    outer.launch = lambda *args: handed_on.append(args)
    mark = object()
    outer(1, 1, 1, 0, kernel.function, metadata, None, None, None, mark)
    (args,) = handed_on
    if args[:5] != (1, 1, 1, 0, kernel.function) or args[-1] not in (mark, (mark,)):
        return plain
    return run.launch, kernel.function, args[5:-1], args[-1] is not mark


def flash_attn_backwards(library: Any) -> tuple[Any, Any] | None:
    """The backward of flash-attn, of whole batches and of packed rows; None where they are gone.

    Its public functions have theirs in autograd alone, which would compute forward again.
    """
    try:
        return library._flash_attn_backward, library._flash_attn_varlen_backward
    except AttributeError:
        return None


if lacking:
    warnings.warn(
        f"opfuser is tested with torch {TESTED['torch']}. torch {torch.__version__} lacks "
        f"{', '.join(dict.fromkeys(lacking))}: what depends on it is slower, or raises an error.",
        stacklevel=2,
    )
