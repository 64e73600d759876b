"""A plan as text: equal layers once, the odd one out with its reason, kernels, and `why`."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser as of
from opfuser.core.fusion import Refusal, Requires
from opfuser.engine.plan import Plan
from opfuser.errors import UnknownFusionError
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.recipe import Float8CurrentScaling
from opfuser.registry import registry
from opfuser.sequence.plain_modules import replacement
from tests.planning.toys import FusedForward, plan, rule


@pytest.fixture
def built_in() -> Iterator[None]:
    names = [h.name for h in registry if not h.name.startswith("recompute_mlp")]
    with of.enable(*names):
        yield


def text_of(expected: str) -> str:
    return dedent(expected).strip("\n")


def before_fusions(made: Plan) -> str:
    """Fusions that are added later are listed behind it."""
    return str(made).partition("\nfusions:")[0]


def llama(layers: int, device: str = "meta") -> of.Sequential:
    config = DecoderConfig(64, 32, layers, num_heads=4, num_kv_heads=2, ffn_dim=64)
    with torch.device(device):
        return decoder_lm(config).to(torch.bfloat16)


def plan_of(model: of.Sequential, device: str = "meta") -> Plan:
    tokens = torch.zeros(2, 8, dtype=torch.int64, device=device)
    return model.plan(*[tokens] * (1 + model.num_extra_inputs))


# The whole.


def test_a_plan_reads_well() -> None:
    made = plan(
        "ABC", rule("A B", name="ab"), rule("B C", "backward", name="bc"),
        rule("C C", "backward", name="cc", requires=Requires(device="cuda")),
        rule("C A", name="ca"), rule("C", name="c", refuses=lambda c, env: Refusal("SHAPE", "odd")),
    )  # fmt: skip
    assert str(made) == text_of("""
        Plan for 3 basic operations (torch.float32, cpu, autocast off, grad on)
        forward:
          0-1  A + B -> ab
          2    C
        backward: the steps of forward in reverse, but
          1-2  B + C -> bc
          0    A
        fusions:
          ab (forward): 1 match
          ca (forward): not found
            closest: 1 of 2 at op 2; GROUP_SPLIT: the run of operations ends where A is
                expected
          c (forward): refused at 1 place
            op 2 (C): SHAPE: odd
          bc (backward): 1 match
          skipped (needs cuda, have cpu): cc
    """)


def test_passes_that_are_alike_or_missing() -> None:
    assert str(plan("AB", rule("A B", "joint"))) == text_of("""
        Plan for 2 basic operations (torch.float32, cpu, autocast off, grad on)
        forward:
          0-1  A + B -> rule
        backward: the steps of forward in reverse
        fusions:
          rule (joint): 1 match
    """)
    assert str(plan("A", needs=(False,))) == text_of("""
        Plan for 1 basic operation (torch.float32, cpu, autocast off, grad on)
        forward:
          0  A
        backward: none
        fusions: none is registered
    """)
    late = str(plan("ABC", needs=(False, False, True)))
    assert "backward: the steps of forward in reverse\n  no gradient is needed: ops 0-1\n" in late


@pytest.mark.usefixtures("built_in")
def test_a_llama_of_two_layers() -> None:
    made = plan_of(llama(2))
    assert before_fusions(made) == text_of("""
        Plan for 30 basic operations (torch.int64, meta, autocast off, grad on)
        forward:
          0      embedding Embedding
          layers.0-1, 2 times, ops 1-25:
            1-3    (the previous mlp.5 AddExtraInput +) attention.0-2 MakeExtraOutput +
                   RMSNorm + BasicLinear -> norm_linear: Triton norm, cuBLAS
            4      attention.3 RotaryEmbedding: Triton rotary
            5      attention.4 DotProductAttention: attention by cudnn or flash or
                   efficient or flex or blockwise, as sizes and keywords allow; not cpu:
                   it runs on a CPU, not on cuda; not flash_attn: flash_attn is not
                   installed
            6      attention.5 BasicLinear: cuBLAS
            7-10   attention.6 AddExtraInput + mlp.0-2 MakeExtraOutput + RMSNorm +
                   BasicLinear -> norm_linear: Triton norm, cuBLAS
            11-12  mlp.3-4 SwiGLU + BasicLinear -> activation_linear: Triton gated,
                   cuBLAS
          26-27  layers.1.mlp.5 AddExtraInput + norm RMSNorm -> forward_add_rms_norm:
                 Triton norm
          28-29  head BasicLinear + loss CrossEntropy -> linear_cross_entropy: cuBLAS,
                 Triton cross_entropy
        backward: the steps of forward in reverse, but
          27  norm RMSNorm: Triton norm
          26  layers.1.mlp.5 AddExtraInput
        kernels: torch's where none is named; meta is planned as a GPU
    """)


@pytest.mark.usefixtures("built_in")
@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(("layers", "operations"), [(2, 30), (27, 355)])
def test_a_plan_fits_on_a_screen(layers: int, operations: int, device: str) -> None:
    made = plan_of(llama(layers, "meta" if layers > 2 else device), device)
    lines = str(made).splitlines()
    assert len(made.basic_ops) == operations
    assert len(lines) < 50
    assert max(map(len, lines)) <= 80


@pytest.mark.usefixtures("built_in")
def test_the_odd_layer_is_shown_with_its_reason() -> None:
    model = llama(27)
    model[1][13].mlp[2] = nn.Linear(32, 128, False, "meta", torch.bfloat16)
    text = str(plan_of(model))
    assert "\n  layers.0-12, 13 times, ops 1-168:\n" in text
    assert (
        "\n  -        layers.13.mlp.2 Linear (plain module): opfuser.Linear can replace it" in text
    )
    assert "\n  layers.14-26, 13 times, ops 181-349: as layers.0-12\n" in text
    assert (
        "\n  norm_linear (joint): 53 matches, refused at 1 place\n"
        "    op 176 (layers.13.attention.6 AddExtraInput): GROUP_SPLIT: torch.nn.Linear\n"
        "        stands where opfuser.Linear would fit (layers.13.mlp.2)\n"
    ) in text
    assert len(text.splitlines()) < 75
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.usefixtures("built_in")
def test_a_layer_without_kernels_for_its_dtype_is_shown_by_itself() -> None:
    layers = (of.Sequential(of.RMSNorm(8), of.Linear(8, 8, bias=False)) for _ in range(7))
    model = of.Sequential(*layers)
    model[3].double()
    text = str(model.to("meta").plan(torch.ones(2, 8, device="meta")))
    assert "\n  0-2, 3 times, ops 0-5:\n" in text
    assert "\n  6-7  3.0-1 RMSNorm + BasicLinear -> norm_linear: cuBLAS\n" in text
    assert "\n  4-6, 3 times, ops 8-13: as 0-2\n" in text


@pytest.mark.usefixtures("built_in")
def test_a_flat_sequence() -> None:
    """Its layers have no names: their numbers are listed."""
    with torch.device("meta"):
        model = of.Sequential(*[op for _ in range(100) for op in (of.Linear(8, 8), of.GELU())])
        made = model.plan(torch.zeros(2, 8))
    assert before_fusions(made) == text_of("""
        Plan for 300 basic operations (torch.float32, meta, autocast off, grad on)
        forward:
          0    0 BasicLinear: cuBLAS
          1-4  0-2 Bias + GELU + BasicLinear + Bias -> activation_linear: Triton
               activation, cuBLAS
          98 times, ops 5-298:
            5-7  [3, 5 ... 197] GELU + [4, 6 ... 198] BasicLinear + Bias ->
                 activation_linear: Triton activation, cuBLAS
          299  199 GELU: Triton activation
        backward: the steps of forward in reverse
        kernels: torch's where none is named; meta is planned as a GPU
    """)


def test_equal_calls_give_equal_texts() -> None:
    first, second = plan("ABABAC", rule("A B")), plan("ABABAC", rule("A B"))
    assert [r.elapsed for r in first.history] != [r.elapsed for r in second.history]
    assert str(first) == str(second)
    assert "time=" not in str(first) + first.history[0].summary()


def test_long_words_do_not_leave_the_screen() -> None:
    name = "a" * 100
    seq = of.Sequential({name: of.Sequential(of.Identity(), nn.Tanh(), of.Identity())})
    assert max(map(len, str(seq.plan(torch.ones(2))).splitlines())) <= 80


# Plain modules.


class Gelu(nn.GELU):
    pass


def hooked() -> nn.Module:
    module = nn.GELU()
    module.register_forward_hook(lambda *_: None)
    return module


def replaced() -> nn.Module:
    module = nn.GELU()
    module.forward = lambda x: x
    return module


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.GELU(), 'opfuser.GELU("none")'),
        (nn.GELU("tanh"), 'opfuser.GELU("tanh")'),
        (nn.Linear(2, 2), "opfuser.Linear"),
        (nn.LayerNorm(2), "opfuser.LayerNorm"),
        (nn.Sequential(nn.Tanh()), "opfuser.Sequential"),
        (nn.LayerNorm(2, bias=False), None),
        (nn.LayerNorm(2, elementwise_affine=False), None),
        (nn.RMSNorm(2, elementwise_affine=False), None),
        (nn.Embedding(2, 2, max_norm=1.0), None),
        (nn.Softsign(), None),
        (Gelu(), None),
        (hooked(), None),
        (replaced(), None),
    ],
)
def test_what_can_replace_a_plain_module(module: nn.Module, text: str | None) -> None:
    found = replacement(module)
    assert (found and found.text) == text


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(), nn.Embedding(2, 2), nn.GELU(), nn.Identity(), nn.LayerNorm(2),
        nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.RMSNorm(2), nn.ReLU(), nn.SiLU(),
        nn.Sigmoid(), nn.Softplus(), nn.Tanh(),
    ],
    ids=repr,
)  # fmt: skip
def test_a_replacement_is_what_from_torch_makes(module: nn.Module) -> None:
    """The operations that fusions are asked about, and the class that the text names."""
    found = replacement(module)
    assert found is not None
    (made,) = of.from_torch(module) or [of.Identity()]
    assert type(made).__name__ == found.text.removeprefix("opfuser.").partition("(")[0]
    parts = list(made.basic_ops) if isinstance(made, of.FusedOperation) else [made]
    assert [type(op) for op in found.operations] == [type(op) for op in parts]


def test_a_plain_module_in_the_way_is_named() -> None:
    pair = of.Fusion("pair", "forward", (of.Bias, of.GELU), FusedForward)
    model = of.Sequential({"a": of.Sequential(of.Bias(4), nn.GELU(), nn.Softsign(), of.GELU())})
    with of.register_forward_fusion(pair):
        made = model.plan(torch.ones(2, 4))
    ((at, no),) = made.record("pair").refusals
    assert (at, no.code) == (0, "GROUP_SPLIT")
    assert [step.path for step in made.forward] == ["", "a.1", "a.2", ""]
    text = str(made)
    assert '\n  -  a.1 GELU (plain module): opfuser.GELU("none") can replace it\n' in text
    assert "\n  -  a.2 Softsign (plain module)\n" in text
    assert (
        "pair (forward): refused at 1 place op 0 (a.0 Bias): GROUP_SPLIT: torch.nn.GELU "
        'stands where opfuser.GELU("none") would fit (a.1)'
    ) in " ".join(text.split())


def test_a_module_before_the_operations_is_one_in_the_way_too() -> None:
    pair = of.Fusion("pair", "forward", (of.Bias, of.GELU), FusedForward)
    model = of.Sequential(of.Identity(), nn.Linear(4, 4), of.GELU())
    with of.register_forward_fusion(pair):
        made = model.plan(torch.ones(2, 4))
    assert [(at, str(no)) for at, no in made.record("pair").refusals] == [
        (1, "GROUP_SPLIT: torch.nn.Linear stands where opfuser.Linear would fit")
    ]
    assert " would fit (1)" in " ".join(str(made).split())
    assert made.why("pair", at=1).endswith(" would fit (1)")


def test_why_at_an_operation_within_what_a_module_stops() -> None:
    triple = of.Fusion("triple", "forward", (of.Identity, of.Bias, of.GELU), FusedForward)
    model = of.Sequential(of.Identity(), of.Bias(4), nn.GELU())
    with of.register_forward_fusion(triple):
        made = model.plan(torch.ones(2, 4))
    for at in (0, 1):
        assert " ".join(made.why("triple", at).split()).endswith(
            "refused at op 0 (0 Identity): GROUP_SPLIT: torch.nn.GELU stands where "
            'opfuser.GELU("none") would fit (2)'
        )


def test_modules_alone_are_no_reason() -> None:
    """No operation of the plan would take part."""
    pair = of.Fusion("pair", "forward", (of.Bias, of.GELU), FusedForward)
    model = of.Sequential(of.Identity(), nn.Linear(4, 4), nn.GELU())
    with of.register_forward_fusion(pair):
        assert model.plan(torch.ones(2, 4)).record("pair").status == "unmatched"


@pytest.mark.usefixtures("built_in")
def test_a_fusion_that_nobody_asks_for_is_not_in_the_way() -> None:
    """recompute_mlp_where_asked would decline all the same."""
    model = of.Sequential(of.LayerNorm(4), of.Linear(4, 4), nn.GELU(), of.Linear(4, 4))
    with of.enable("recompute_mlp_where_asked"):
        made = model.plan(torch.ones(2, 4))
        assert made.record("recompute_mlp_where_asked").refusals == ()
        assert made.record("activation_linear").refusals != ()


# Near misses.


def layers(odd: nn.Module) -> of.Sequential:
    blocks = [of.Sequential(of.Identity(), of.GELU()) for _ in range(5)]
    blocks[3] = of.Sequential(of.Identity(), odd)
    return of.Sequential({"blocks": of.Sequential(*blocks)})


class MyGELU(of.GELU):
    pass


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (of.ReLU(), "LAYOUT: GELU is expected where ReLU stands"),
        (MyGELU(), "SUBCLASS: MyGELU is a subclass of GELU"),
    ],
)
def test_a_near_miss_is_shown_where_like_places_matched(odd: nn.Module, reason: str) -> None:
    pair = of.Fusion("pair", "forward", (of.Identity, of.GELU), FusedForward)
    with of.register_forward_fusion(pair):
        made = layers(odd).plan(torch.ones(2))
    assert made.fused("forward") == {"pair": 4}
    text = " ".join(str(made).split())
    assert f" pair (forward): 4 matches not from op 6 (blocks.3.0 Identity): {reason} " in text


@pytest.mark.parametrize(
    ("blocks", "found"),
    [
        ([(of.Identity, of.GELU, of.Identity, of.ReLU)] * 3, "3 matches"),
        ([(of.Identity, of.GELU), *[(of.Identity, of.ReLU)] * 3], "1 match"),
    ],
    ids=["elsewhere in every layer", "at most places like them"],
)
def test_other_near_misses_are_not(blocks: list[tuple[Any, ...]], found: str) -> None:
    pair = of.Fusion("pair", "forward", (of.Identity, of.GELU), FusedForward)
    model = of.Sequential(*(of.Sequential(*(kind() for kind in block)) for block in blocks))
    with of.register_forward_fusion(pair):
        made = model.plan(torch.ones(2))
    assert len(made.record("pair").near_misses) == 3
    assert f"\n  pair (forward): {found}\n" in str(made)
    assert "not from" not in str(made)


def test_refusals_are_told_once_for_all_layers() -> None:
    no = Refusal("DTYPE", "weight is float32; the kernel takes bf16")
    made = plan("CABAB", rule("A B", refuses=lambda a, b, env: no))
    assert f"\n  rule (forward): refused at 2 places\n    ops 1, 3: {no}" in str(made)
    pair = of.Fusion("pair", "forward", (of.Identity, of.GELU), FusedForward, lambda a, b, env: no)
    with of.register_forward_fusion(pair):
        text = str(layers(of.GELU()).plan(torch.ones(2)))
    assert f"\n    blocks.0-4.0 Identity: {no}" in text


# Kernels.


class Mine(of.BasicOperation):
    kernels = ("my_package.mine",)

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor: ...


class Inherits(Mine):
    pass


class MyActivation(of.ReLU):
    pass


def step_texts(model: of.Sequential, x: Tensor) -> list[str]:
    text = str(model.plan(x)).partition("forward:\n")[2].partition("\nbackward")[0]
    return [line.strip() for line in text.splitlines()]


def test_operations_of_users_say_what_computes_them() -> None:
    assert step_texts(of.Sequential(Mine(), Inherits(), MyActivation()), torch.ones(2)) == [
        "0  0 Mine: my_package.mine",
        "1  1 Inherits",
        "2  2 MyActivation",
    ]


@pytest.mark.parametrize(
    ("dtype", "device", "kernels", "note"),
    [
        (torch.bfloat16, "meta", ": Triton norm, cuBLAS", "meta is planned as a GPU"),
        (torch.float64, "meta", ": cuBLAS", "Triton has none for this dtype: norm"),
        (torch.float32, "cpu", "", "kernels: torch's; Triton has none for cpu: norm"),
    ],
)
@pytest.mark.usefixtures("built_in")
def test_kernels_that_a_call_does_not_get_are_named(
    dtype: torch.dtype, device: str, kernels: str, note: str
) -> None:
    model = of.Sequential(of.LayerNorm(8), of.Linear(8, 8)).to(device, dtype)
    x = torch.ones(2, 8, device=device, dtype=dtype)
    (step,) = step_texts(model, x)
    assert step == f"0-2  0-1 LayerNorm + BasicLinear + Bias -> norm_linear{kernels}"
    assert note in " ".join(str(model.plan(x)).split())


@pytest.mark.usefixtures("built_in")
@pytest.mark.filterwarnings("ignore:FP8 is emulated")
@pytest.mark.parametrize(
    ("gemm", "device", "by"),
    [
        ("torch", "meta", "scaled_mm"),
        ("torch", "cpu", "emulated scaled_mm"),
        ("te", "cpu", "emulated scaled_mm"),
    ],
)
def test_who_computes_quantized_products(gemm: str, device: str, by: str) -> None:
    model = of.Sequential(of.Linear(32, 32, bias=False, device=device))
    x = torch.ones(32, 32, device=device)
    with of.autocast(recipe=Float8CurrentScaling(gemm=gemm)):
        made = model.plan(x)
    text = str(made)
    assert f"{by}\n" in text.partition("\nquantized")[0]
    refuses = "  fprop of op 0: torch, because te refuses: products are emulated on cpu\n"
    assert (refuses in text) == (gemm == "te")


# One fusion.


def test_why() -> None:
    no = Refusal("SHAPE", "odd")
    pair = of.Fusion(
        "pair", "forward", (of.Identity, of.Optional(of.Bias), of.GELU), FusedForward,
        lambda a, bias, b, env: no if b.approximate == "none" else None,
    )  # fmt: skip
    parts = [
        of.Identity(), of.GELU(), of.Identity(), of.GELU("none"), of.Identity(), of.ReLU(),
    ]  # fmt: skip
    model = of.Sequential({"b": of.Sequential(*parts)})
    with of.register_forward_fusion(pair):
        made = model.plan(torch.ones(2))
        pattern = "\n  pattern: Identity, Bias?, GELU\n"
        assert made.why("pair") == text_of("""
            pair (forward): matched
              pattern: Identity, Bias?, GELU
              matched 2 operations from op 0 (b.0 Identity)
              refused at op 2 (b.2 Identity): SHAPE: odd
              1 operation fits from op 4 (b.4 Identity), then LAYOUT: GELU is expected where
                  ReLU stands
        """)
        head = f"pair (forward): matched{pattern}  "
        assert made.why("pair", at=1) == head + "matched ops 0-1, which include op 1 (b.1 GELU)"
        assert made.why("pair", at=2) == head + "refused at op 2 (b.2 Identity): SHAPE: odd"
        assert made.why("pair", at=3) == (
            head + "its pattern does not begin at op 3 (b.3 GELU), nor reach it"
        )
        for at in (4, 5):  # also where what stopped it stands
            assert made.why("pair", at=at).endswith("GELU is expected where\n      ReLU stands")
    assert made.why("pair", at=2) == (
        "pair (forward): matched\n  refused at op 2 (b.2 Identity): SHAPE: odd"
    ), "the pattern is known while the fusion is registered"


def test_why_names_what_fused_an_operation_instead() -> None:
    made = plan("ABC", rule("A B", name="first"), rule("A C", name="second"))
    assert made.why("second", at=1) == text_of("""
        second (forward): unmatched
          its pattern does not begin at op 1 (B), nor reach it
          first has fused ops 0-1, which include op 1 (B)
    """)
    assert made.why("second").endswith("\n  no operation begins the pattern")


@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ({"requires": Requires(device="cuda")}, "skipped (needs cuda, have cpu)"),
        ({"requires": Requires(package="no_such_one")}, "skipped (needs the package no_such_one)"),
        ({"enabled": False}, "disabled (default)"),
    ],
)
def test_why_a_fusion_was_not_tried(options: Any, outcome: str) -> None:
    made = plan("AB", rule("A B", **options))
    for at in (None, 0):
        assert made.why("rule", at) == f"rule (forward): {outcome}"
    assert made.record("rule").matches == ()
    assert [step.indices for step in made.forward] == [(0,), (1,)]


def test_errors_of_why() -> None:
    made = plan("AB", rule("A B", name="norm_linear"), rule("B A", name="other"))
    with pytest.raises(UnknownFusionError) as error:
        made.why("norm_linaer")
    assert str(error.value) == (
        "A plan knows the fusions that were registered when it was made. "
        "Received: 'norm_linaer'. Choose among: norm_linear."
    )
    with pytest.raises(KeyError, match="Choose among: norm_linear, other"):
        made.why("zzz")
    with pytest.raises(KeyError, match="None was"):
        plan("A").why("zzz")
    for at in (2, -1):
        with pytest.raises(IndexError) as out_of_range:
            made.why("other", at)
        assert str(out_of_range.value) == (
            f"An operation of a plan is named by its index. Received: at={at} for 2 operations."
        )
