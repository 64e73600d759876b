"""Training steps of a Llama of transformers, and one with adapters of PEFT.

Untouched, with ``opfuser.hf.apply`` or ``opfuser.apply``, and by others.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import opfuser
from benchmarks.gpu import model as whole
from benchmarks.gpu import peers
from benchmarks.gpu.blocks import randomize
from benchmarks.gpu.contest import solve
from benchmarks.gpu.problem import STEP, Case, Function, Inputs, Options, Problem, Row, Within
from opfuser import hf

MODES = ("default", "opfuser")
# What transformers calls the sizes of a decoder.
NAMES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
}


def llama(options: Options, layers: int, length: int) -> nn.Module:
    """From a configuration, its attention by torch's scaled_dot_product_attention."""
    transformers = importlib.import_module("transformers")
    sizes = whole.SMALL if options.tiny else whole.LLAMA_1B
    config = transformers.LlamaConfig(
        **{NAMES[name]: size for name, size in sizes.items()},
        num_hidden_layers=layers,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device(options.device):
        made: nn.Module = transformers.LlamaForCausalLM(config).to(options.dtype).train()
    return made


def loss_of(model: nn.Module) -> Function:
    def loss(tokens: Tensor) -> Any:
        return model(input_ids=tokens, labels=tokens).loss

    return loss


def sharing(source: nn.Module) -> nn.Module:
    """A copy with the source's parameters, the same objects."""
    own: nn.Module = copy.deepcopy(source, {id(p): p for p in source.parameters()})
    return own


def replaced(source: nn.Module, **options: bool) -> Function:
    model = sharing(source)
    hf.apply(model, **options)
    return loss_of(model)


def adapted(options: Options, layers: int, length: int) -> nn.Module:
    """A Llama with adapters of rank 16 on queries, values and both sides of the feed-forward."""
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(
        r=16,
        lora_alpha=1,  # so that bf16 tells gradients from noise; times are those of any
        target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
        init_lora_weights=False,
    )
    model = llama(options, layers, length)
    with warnings.catch_warnings():  # PEFT asks transformers by a name that is deprecated there
        warnings.simplefilter("ignore", FutureWarning)
        made: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return made


def applied(source: nn.Module) -> Function:
    model = sharing(source)
    opfuser.apply(model)
    return loss_of(model)


def by_liger(source: nn.Module) -> Function:
    """Liger's patch of a model, which may be one of PEFT.

    It also sets names in the module of all Llamas, such as the function of rotary embeddings, which
    torch.compile cannot trace. They hold during its own calls, so that the others are untouched.
    """
    inside = next(m for m in source.modules() if "lm_head" in m._modules)
    names = vars(importlib.import_module(type(inside).__module__))
    untouched = dict(names)
    patched: dict[str, Any] = {}

    def build() -> Function:
        liger = importlib.import_module("liger_kernel.transformers")
        model = sharing(source)
        within = next(m for m in model.modules() if type(m) is type(inside))
        liger.apply_liger_kernel_to_llama(model=within)
        return loss_of(model)

    @contextlib.contextmanager
    def own_names() -> Iterator[None]:
        names.update(patched)
        try:
            yield
        finally:
            patched.update({n: v for n, v in names.items() if v is not untouched.get(n)})
            names.update(untouched)

    return Within(peers.late(build), own_names)


def step(options: Options, layers: int, length: int) -> Problem:
    source = llama(options, layers, length)
    functions = {
        "opfuser": replaced(source),
        "opfuser, fused loss, merged weights": replaced(
            source, fused_loss=True, merge_storages=True
        ),
    }
    return problem(options, length, source, functions)


def lora_step(options: Options, layers: int, length: int) -> Problem:
    source = adapted(options, layers, length)
    functions = {
        "opfuser": applied(source),
        "opfuser, fused loss": replaced(source, fused_loss=True),
    }
    made = problem(options, length, source, functions)
    return dataclasses.replace(made, exact=lambda inputs: in_fp32(source, inputs))


def in_fp32(source: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The loss and the gradients of the same model in fp32, of one sequence after the other.

    In bf16 errors of small gradients grow through all layers: torch is no reference.
    """
    model = copy.deepcopy(source).float()
    wanted, loss = [p for p in model.parameters() if p.requires_grad], loss_of(model)
    sums: list[Tensor] = []
    for tokens in inputs.args[0].split(1):
        y = loss(tokens)
        found = [y.detach(), *torch.autograd.grad(y, wanted, *inputs.grads)]
        sums = [a + b for a, b in zip(sums, found)] if sums else found
    return [t / len(inputs.args[0]) for t in sums]


def problem(options: Options, length: int, source: nn.Module, ours: dict[str, Function]) -> Problem:
    randomize(source)
    config: Any = source.config
    classes = config.vocab_size

    def draw() -> Inputs:
        tokens = torch.randint(classes, (2, length), device=options.device)
        return Inputs((tokens,), (torch.ones((), device=options.device),))

    functions: dict[str, Function] = {"torch": loss_of(source), **ours}
    if peers.installed(peers.LIGER):
        functions["Liger-Kernel"] = by_liger(source)
    return Problem(
        draw,
        functions,
        {STEP: None},
        tuple(p for p in source.parameters() if p.requires_grad),
        tolerance=whole.TOLERANCE.get(options.dtype),
        wall=1,
    )


CASES = (
    Case(
        "Llama 1B of transformers",
        step,
        ({"layers": 16, "length": 4096},),
        {"layers": 1, "length": 16},
    ),
    Case(
        "Llama 1B, LoRA",
        lora_step,
        ({"layers": 16, "length": 4096},),
        {"layers": 1, "length": 16},
    ),
)


def available() -> bool:
    """Whether transformers can be imported."""
    return importlib.util.find_spec("transformers") is not None


def rows(options: Options) -> Iterator[Row]:
    modes = MODES if options.modes is None else options.modes
    for case in CASES if available() else ():
        if case.make is not lora_step or importlib.util.find_spec("peft") is not None:
            yield from solve(case, options, modes)
