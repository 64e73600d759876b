"""What subscribers are told, when, and that nothing depends on whether anybody is."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import opfuser
from opfuser import events
from opfuser.errors import ArgumentError
from opfuser.events import (
    AttentionKernelTaken,
    BytesSaved,
    Change,
    FallbackTaken,
    FusionMatched,
    FusionRefused,
    KernelCompiled,
    PlanCreated,
    PlanInvalidated,
    ScalesUpdated,
    record_events,
    subscribe,
)
from opfuser.models import DecoderConfig, decoder_layer
from opfuser.recipe import DelayedScaling, Float8CurrentScaling
from tests.engine.toys import Square
from tests.planning.toys import REGISTER, rule

emulated = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")


def block() -> opfuser.Sequential:
    return opfuser.Sequential(opfuser.Linear(4, 4), opfuser.GELU(), opfuser.Dropout(0.5))


def number_of(seq: opfuser.Sequential) -> int:
    plan = seq.last_plan
    assert plan is not None
    (number,) = plan.numbers
    return number


# Subscribing.


def test_only_what_is_subscribed_to_is_wanted() -> None:
    kinds = [PlanCreated, FusionMatched, KernelCompiled, BytesSaved, ScalesUpdated]
    before = [kind.wanted for kind in kinds]
    assert not any(before)
    with subscribe(print, only=BytesSaved), subscribe(print, only=(BytesSaved, KernelCompiled)):
        assert [kind.wanted for kind in kinds] == [False, False, True, True, False]
    assert [kind.wanted for kind in kinds] == before
    with record_events():
        assert all(kind.wanted for kind in kinds)
    assert [kind.wanted for kind in kinds] == before


def test_a_removed_callback_is_told_nothing_more() -> None:
    told: list[events.Event] = []
    handle = subscribe(told.append, only=PlanCreated)
    block()(torch.ones(2, 4))
    assert len(told) == 1
    handle.remove()
    handle.remove()
    block()(torch.ones(2, 4))
    assert len(told) == 1


def test_a_failing_callback_is_logged_once_and_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(event: events.Event) -> None:
        raise RuntimeError("of the callback")

    x = torch.ones(2, 4)
    seq = block().eval()
    with subscribe(fails), record_events(only=BytesSaved) as log:
        y = seq(x)
        seq(x)
    assert torch.equal(y, seq(x))
    assert len(log) == 2, "others are still told"
    (record,) = [r for r in caplog.records if r.name == "opfuser" and r.levelno > logging.INFO]
    assert record.getMessage() == "A callback of opfuser.events failed, and is still called"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "of the callback"


def test_what_a_callback_causes_is_told_to_others_alone() -> None:
    mine: list[events.Event] = []

    def calls(event: events.Event) -> None:
        mine.append(event)
        block()(torch.ones(2, 4))

    with record_events(only=PlanCreated) as log, subscribe(calls, only=PlanCreated):
        block()(torch.ones(2, 4))
    assert len(mine) == 1
    assert len(log) == 2


def test_threads_are_told_of_and_lose_nothing() -> None:
    models = [block() for _ in range(8)]

    def work(seq: opfuser.Sequential) -> None:
        for _ in range(20):
            seq(torch.ones(2, 4))

    with record_events(only=BytesSaved) as log:
        threads = [threading.Thread(target=work, args=(seq,)) for seq in models]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            list(log)
        for thread in threads:
            thread.join()
    told = [event.plan for event in log.of(BytesSaved)]
    assert {told.count(number_of(seq)) for seq in models} == {20}


def test_a_full_log_keeps_the_last_events() -> None:
    seq = block()
    with record_events(limit=3) as log:
        for _ in range(5):
            seq(torch.ones(2, 4))
    assert len(log) == 3
    assert log.dropped > 2
    assert {type(event) for event in log} == {BytesSaved}
    assert (log[0], log[1:]) == (log.of(BytesSaved)[0], log.of(BytesSaved)[1:])
    assert repr(log) == f"EventLog(3 events, {log.dropped} dropped)"


def test_events_cannot_be_changed_and_compare_by_value() -> None:
    event = BytesSaved(1, 2, 3, False)
    assert event == BytesSaved(1, 2, 3, False) != BytesSaved(1, 2, 4, False)
    with pytest.raises(FrozenInstanceError):
        event.plan = 2  # type: ignore[misc]


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: subscribe(3), r"A subscriber .*function of an event \(opfuser.events.subscribe\)"),  # type: ignore[arg-type]
    (lambda: subscribe(print, only=int), r"chosen by their classes.*Received: <class 'int'>"),  # type: ignore[arg-type]
    (lambda: subscribe(print, only=()), r"Choose among: PlanCreated, .*, ScalesUpdated"),
    (lambda: record_events(limit=0).__enter__(), r"positive number of events.*limit=0"),
    (lambda: record_events(only=3).__enter__(), r"classes \(opfuser.record_events\)"),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_wrong_arguments(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        wrong()


# Plans.


def test_a_plan_is_told_and_then_what_refused() -> None:
    no = opfuser.Refusal("SHAPE", "odd")
    seq = opfuser.Sequential(opfuser.Identity(), Square(), opfuser.Identity(), Square())
    fusion = rule("A", name="test_refusing", refuses=lambda op, env: no)
    fusion = replace(fusion, pattern=(Square,))
    with REGISTER["forward"](fusion), record_events() as log:
        seq(torch.ones(2, 3, requires_grad=True))
    number = number_of(seq)
    names, cpu = ("Identity", "Square", "Identity", "Square"), torch.device("cpu")
    made = PlanCreated(number, names, torch.float32, cpu, None, True, "", 4, 4)
    assert log[0] == made
    refused = [FusionRefused(number, "test_refusing", "forward", at, *no) for at in (1, 3)]
    assert [e for e in log.of(FusionRefused) if e.fusion == "test_refusing"] == refused
    assert str(made) == f"[plan {number}] created: 4 operations in 4 forward and 4 backward steps"
    assert str(refused[0]) == f"[plan {number}] test_refusing (forward) refused at 1: SHAPE: odd"


def test_a_match_is_told_with_its_operations() -> None:
    seq = opfuser.Sequential(opfuser.Identity(), opfuser.Linear(4, 4))
    with record_events(only=FusionMatched) as log:
        seq(torch.ones(2, 4))
    assert log[0] == FusionMatched(
        number_of(seq), "forward_linear_bias_activation", "forward", (1, 2)
    )
    assert str(log[0]).endswith("forward_linear_bias_activation (forward) matched at 1, 2")


X = torch.ones(2, 4)


def switch_off(seq: opfuser.Sequential) -> None:
    with opfuser.disable("forward_linear_bias_activation"):
        seq(X)


def configure(seq: opfuser.Sequential) -> None:
    overrides = {"0": {"forward_linear_bias_activation": {"enabled": False}}}
    with opfuser.fusion_config({"schema": "opfuser.fusions/1", "overrides": overrides}):
        seq(X)


def register(seq: opfuser.Sequential) -> None:
    with REGISTER["forward"](rule("A B", name="test_events")):
        seq(X)


LINEAR = "op 0 (BasicLinear)"
PARAMETERS = f"weight of {LINEAR}, bias of op 1 (Bias)"
CHANGES: dict[str, tuple[Callable[[opfuser.Sequential], Any], list[Change]]] = {
    "training": (
        lambda seq: seq.eval()(X),
        [Change(f"training of {LINEAR} and 3 more", "True", "False")],
    ),
    "dtype": (
        lambda seq: seq.double()(X.double()),
        [
            Change("dtype of the input", "torch.float32", "torch.float64"),
            Change(f"dtype of {PARAMETERS}", "torch.float32", "torch.float64"),
        ],
    ),
    "attribute": (
        lambda seq: (setattr(seq[2], "dropout_probability", 0.25), seq(X)),
        [Change("dropout_probability of op 3 (Dropout)", "0.5", "0.25")],
    ),
    "frozen": (
        lambda seq: (seq[0].requires_grad_(False), seq(X)),
        [Change(f"requires_grad of {PARAMETERS}", "True", "False")],
    ),
    "input": (
        lambda seq: seq(X.clone().requires_grad_()),
        [Change("requires_grad of the input", "False", "True")],
    ),
    "grad mode": (
        lambda seq: torch.no_grad()(seq)(X),
        [Change("grad mode", "True", "False")],
    ),
    "autocast": (
        lambda seq: torch.autocast("cpu", torch.bfloat16)(seq)(X),
        [Change("autocast dtype", "None", "torch.bfloat16")],
    ),
    "recipe": (
        lambda seq: opfuser.autocast(recipe=DelayedScaling())(seq)(X),
        [Change("recipe", "none", "DelayedScaling")],
    ),
    "buffer": (
        lambda seq: (seq[1].register_buffer("table", torch.ones(3)), seq(X)),
        [Change("buffer table of op 2 (GELU)", "absent", "(torch.float32, torch.Size([3]), cpu)")],
    ),
    "switch": (
        switch_off,
        [Change("fusion forward_linear_bias_activation", "on", "off (opfuser.disable)")],
    ),
    "configuration": (
        configure,
        [Change("configuration of fusions", "as it was", "another one")],
    ),
    "registered": (
        register,
        [Change("fusion test_events", "not registered", "on")],
    ),
    "modules": (
        lambda seq: seq.append(nn.Tanh())(X),
        [Change("groups of modules", "4 operations", "4 operations | Tanh (GROUP_SPLIT)")],
    ),
    "hook": (
        lambda seq: (seq[1].register_forward_hook(lambda *args: None), seq(X)),
        [Change("groups of modules", "4 operations", "2 operations | GELU (HOOK) | 1 operation")],
    ),
}  # fmt: skip


@emulated
@pytest.mark.parametrize("case", CHANGES)
def test_what_made_a_new_plan_necessary_is_told(case: str) -> None:
    act, expected = CHANGES[case]
    seq = block()
    seq(X)
    number = number_of(seq)
    with record_events(only=(PlanInvalidated, PlanCreated)) as log:
        act(seq)
    first = log[0]
    names = "BasicLinear", "Bias", "GELU", "Dropout"
    assert first == PlanInvalidated(number, names, tuple(expected))
    assert isinstance(log[1], PlanCreated), "before the plan that follows it"
    texts = "; ".join(f"{c.what}: {c.before} -> {c.after}" for c in expected)
    assert str(first) == f"[plan {number}] invalidated: {texts}"


@emulated
def test_what_differs_between_two_recipes_is_told() -> None:
    seq = opfuser.Sequential(opfuser.Linear(32, 32))
    with record_events(only=PlanInvalidated) as log:
        for least in (16, 32):
            with opfuser.autocast(recipe=Float8CurrentScaling(min_features=least)):
                seq(torch.ones(16, 32))
    change = Change("Float8CurrentScaling.min_features", "16", "32")
    assert log.of(PlanInvalidated)[0].changes == (change,)


def test_extra_inputs_and_many_parameters() -> None:
    seq = opfuser.Sequential(opfuser.AddExtraInput(), *(opfuser.ConstantScale(n) for n in range(9)))
    biases = opfuser.Sequential(*(opfuser.Bias(4) for _ in range(9)))
    seq(X, X)
    biases(X)
    with record_events(only=PlanInvalidated) as log:
        seq(X, X.clone().requires_grad_())
        for n, bias in enumerate(biases):
            bias.bias = nn.Parameter(torch.ones(4, dtype=torch.float64), n % 2 == 0)
        biases(X)
        seq(X, X.double())
    told = log.of(PlanInvalidated)
    assert told[0].changes == (Change("requires_grad of extra input 0", "False", "True"),)
    assert "dtype of extra input 0: torch.float32 -> torch.float64" in map(str, told[2].changes)
    assert [str(change) for change in told[1].changes] == [
        "dtype of bias of op 0 (Bias) and 8 more: torch.float32 -> torch.float64",
        "requires_grad of bias of op 1 (Bias) and 3 more: True -> False",
    ]


def test_so_many_changes_are_cut_short() -> None:
    seq = opfuser.Sequential(*(opfuser.ConstantScale(float(n)) for n in range(40)))
    seq(X)
    with record_events(only=PlanInvalidated) as log:
        for n, op in enumerate(seq):
            op.scale = n + 0.5  # type: ignore[assignment]
        seq(X)
    (event,) = log.of(PlanInvalidated)
    assert len(event.changes) == 17
    assert event.changes[0] == Change("scale of op 0 (ConstantScale)", "0.0", "0.5")
    assert event.changes[-1] == Change("more", "", "24 other changes")


def test_an_equal_call_and_a_cached_plan_are_no_events() -> None:
    seq = block()
    seq(X)
    seq.eval()(X)
    with record_events(only=(PlanCreated, PlanInvalidated)) as log:
        for mode in (True, False, False, True):
            seq.train(mode)(X)
        block()(X)
    assert [type(event) for event in log] == [PlanCreated], "of the other sequence, its first"


# What is saved.


def held(call: Callable[[], Any], parameters: list[nn.Parameter]) -> tuple[int, int]:
    """Bytes and number of the tensors that autograd's own hooks see."""
    own = {p.untyped_storage().data_ptr() for p in parameters}
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        call()
    seen = [t for t in seen if t.untyped_storage().data_ptr() not in own]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in seen}.values()
    ), len(seen)


def llama() -> opfuser.Sequential:
    return decoder_layer(DecoderConfig(1, 16, 1, 2, num_kv_heads=1, ffn_dim=24))


@pytest.mark.parametrize(
    ("make", "shape"), [(block, (3, 4)), (llama, (2, 5, 16))], ids=["block", "llama"]
)
def test_saved_bytes_are_those_that_autograd_holds(
    make: Callable[[], opfuser.Sequential], shape: tuple[int, ...]
) -> None:
    seq, x = make(), torch.randn(shape, requires_grad=True)
    expected = held(lambda: seq(x), list(seq.parameters()))
    with record_events(only=BytesSaved) as log:
        y = seq(x)
        with torch.no_grad():
            seq(x)
        y.sum().backward()
    assert expected[0] > 0
    (number,) = seq.plan(x).numbers
    assert log[:] == [BytesSaved(number, *expected, checkpointed=False)]


def test_a_slice_keeps_all_of_its_memory() -> None:
    wide = torch.randn(5, 100)
    with record_events(only=BytesSaved) as log:
        opfuser.Sequential(Square())(wide[:, :3].requires_grad_())
    assert log.of(BytesSaved)[0].bytes == 5 * 100 * 4
    assert str(log[0]).endswith("saved 2000 bytes in 1 tensor")


def test_what_a_checkpoint_drops_is_marked() -> None:
    seq, x = block(), X.clone().requires_grad_()
    with record_events(only=BytesSaved) as log:
        checkpoint(seq, x, use_reentrant=False).sum().backward()
    assert [event.checkpointed for event in log.of(BytesSaved)] == [True, True], "and once more"
    assert str(log[0]).endswith("dropped by a checkpoint")


class Sparse(Square):
    """Also saves a tensor that has no memory of its own, but two pieces."""

    def op_forward(self, ctx: Any, input_: Tensor, **kwargs: Any) -> Tensor:
        if ctx.requires_grad:
            ctx.save_for_backward(input_, input_.to_sparse())
        return input_ * input_


def test_sparse_tensors_are_left_out() -> None:
    with record_events(only=BytesSaved) as log:
        opfuser.Sequential(Sparse())(torch.eye(3, requires_grad=True))
    (event,) = log.of(BytesSaved)
    assert (event.bytes, event.tensors) == (3 * 3 * 4, 1)


# Fallbacks.


def test_each_sequence_that_replay_steps_aside_for_is_told_once() -> None:
    one, two = block(), block()
    expected = []
    with opfuser.replay("on"):
        one(X)
        with record_events(only=FallbackTaken) as log:
            for seq in (one, one, two):
                seq(X)
        for seq in (one, two):
            what = "replay of BasicLinear to Dropout (4 operations)"
            no = "DEVICE", "launches on cpu are not recorded"
            expected.append(FallbackTaken(what, "replay", "eager", *no, plan=number_of(seq)))
        assert log[:] == expected
        assert str(log[0]) == (
            f"[plan {number_of(one)}] replay of BasicLinear to Dropout (4 operations): eager "
            "instead of replay; DEVICE: launches on cpu are not recorded"
        )
        with record_events(only=FallbackTaken) as log:
            one(X)
        assert log[:] == expected[:1], "those who subscribe later are told, too"


def test_attention_tells_its_kernel_once_for_each_kind_of_call() -> None:
    op = opfuser.DotProductAttention(2, softcap=3.0)
    plain = opfuser.DotProductAttention(2)
    with record_events(only=(AttentionKernelTaken, FallbackTaken)) as log:
        for x in (torch.randn(2, 5, 48), torch.randn(2, 7, 48), torch.randn(2, 7, 48).double()):
            op(x)
            plain(x)
    no = "it runs on a GPU, not on cpu"
    gpu = ("cudnn", no), ("flash", no), ("efficient", no)
    name = "DotProductAttention(2, 2, causal=True, scale=None"
    taken = AttentionKernelTaken(
        f"{name}, softcap=3.0)",
        "blockwise",
        (*gpu, ("cpu", "it has no soft-capping"), ("flash_attn", no), ("flex", no)),
    )
    what, detail = f"attention of {name}, softcap=3.0)", "cpu: it has no soft-capping"
    fallback = FallbackTaken(what, "cpu", "blockwise", "KERNEL", detail)
    simple = AttentionKernelTaken(f"{name})", "cpu", gpu)
    assert log[:] == [taken, fallback, simple] * 2, "once for fp32, and once for fp64"
    assert str(simple) == (
        f"[attention] {name}): cpu (not cudnn: {no}; flash: {no}; efficient: {no})"
    )
    assert plain.last_choice is not None
    assert plain.last_choice.passed_over == gpu


def test_a_kernel_that_is_asked_for_by_name_is_no_fallback() -> None:
    op = opfuser.DotProductAttention(2, kernel="blockwise")
    with record_events(only=(AttentionKernelTaken, FallbackTaken)) as log:
        op(torch.randn(2, 5, 48))
    (event,) = log.of(AttentionKernelTaken)
    assert (event.kernel, event.note) == ("blockwise", "It is required by name")
    assert len(log) == 1


def test_whoever_waits_for_fallbacks_alone_is_told_of_attention() -> None:
    with record_events(only=FallbackTaken) as log:
        opfuser.DotProductAttention(2, softcap=3.0)(torch.randn(2, 5, 48))
    assert [type(event) for event in log] == [FallbackTaken]


@emulated
def test_what_is_not_computed_as_the_recipe_asks_is_told() -> None:
    own = opfuser.Linear(32, 32)
    own.recipe = None  # type: ignore[assignment]
    seq = opfuser.Sequential(opfuser.Linear(32, 32, bias=False), own)
    recipe = Float8CurrentScaling(min_features=16, gemm="te")
    with opfuser.autocast(recipe=recipe), record_events(only=FallbackTaken) as log:
        seq(torch.ones(16, 32))
    number = number_of(seq)
    told = [(e.what, e.instead_of, e.taken, e.code) for e in log.of(FallbackTaken)]
    products = [(f"{p} of {LINEAR}", "te", "torch", "DEVICE") for p in ("fprop", "dgrad", "wgrad")]
    assert told == [
        ("op 1 (BasicLinear)", "Float8CurrentScaling", "high precision", told[0][3]),
        *products,
        ("products of 1 operation", "GEMMs of FP8", "fp32", "DEVICE"),
    ]
    assert {event.plan for event in log.of(FallbackTaken)} == {number}


# Scales.


@emulated
def test_updates_of_scales_are_told() -> None:
    gc.collect()  # states of other tests
    seq = opfuser.Sequential(*(opfuser.Linear(32, 32, bias=False) for _ in range(2)))
    x, recipe = torch.randn(16, 32, requires_grad=True), DelayedScaling(min_features=16)
    with record_events(only=ScalesUpdated) as log:
        for _ in range(2):
            with opfuser.autocast(recipe=recipe):
                y = seq(x)
            y.sum().backward()
        with opfuser.autocast(recipe=recipe):
            pass
    roles = "input", "weight", "grad_output"
    firsts = [event for event in log.of(ScalesUpdated) if event.reason == "first value"]
    assert sorted(event.roles for event in firsts) == sorted([(role,) for role in roles] * 2)
    others = [event for event in log if event not in firsts]
    assert others == [ScalesUpdated(2, roles, "region")] * 2
    assert str(others[0]) == "[scales] 2 operations: input, weight, grad_output (region)"
    other = opfuser.Sequential(*(opfuser.Linear(32, 32, bias=False) for _ in range(2)))
    other.load_state_dict(seq.state_dict())
    with record_events(only=ScalesUpdated) as log, opfuser.autocast(recipe=recipe):
        other(x)
    assert log.of(ScalesUpdated)[-2:] == [ScalesUpdated(1, roles, "state dict")] * 2


# Nothing depends on it.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # Dynamo's
@pytest.mark.parametrize("op", [opfuser.GELU, Square])
def test_traced_code_tells_of_planning_and_is_not_traced_again(op: Any) -> None:
    torch._dynamo.reset()
    seq, x = opfuser.Sequential(op(), opfuser.Linear(4, 4)), torch.randn(2, 4, requires_grad=True)
    expected = torch.autograd.grad(seq(x).sum(), x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
        with record_events() as log:
            torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), expected)
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), expected)
    assert log.of(BytesSaved) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_telling_waits_for_no_device(no_waiting: Any) -> None:
    cuda: Any = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(2, 16, 128, **cuda, requires_grad=True)
    seq = opfuser.Sequential(
        opfuser.Linear(128, 384, **cuda),
        opfuser.DotProductAttention(2),
        opfuser.Linear(128, 384, **cuda),
        opfuser.DotProductAttention(16, softcap=3.0),  # heads too small for flex_attention
    )

    def step() -> None:
        with opfuser.autocast(recipe=DelayedScaling(min_features=16)):
            y = seq(x)
        y.sum().backward()

    step()
    with record_events() as log, no_waiting():
        step()
        step()
    told = {type(event) for event in log}
    assert {AttentionKernelTaken, FallbackTaken, BytesSaved, ScalesUpdated} <= told
    fallbacks = [event for event in log.of(FallbackTaken) if "softcap" in event.what]
    assert [event.taken for event in fallbacks] == ["blockwise"]
