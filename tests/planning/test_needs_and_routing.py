"""Which gradients are owed, and where extra tensors go."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import opfuser
from opfuser.engine.planning import GradNeeds, grad_needs
from opfuser.engine.routing import PrivateChannel, RoutedGroup, Routing, Slot, public_routing, route
from opfuser.errors import ChannelCapturedError, ChannelError, ChannelIndexError
from opfuser.fuser import OperationFuser
from opfuser.op import BasicOperation


class Extra(BasicOperation):
    """Takes and gives extra tensors, on the channels named; ``"a!"`` is hidden from the caller."""

    def __init__(self, takes: Sequence[str | None] = (), gives: Sequence[str | None] = ()) -> None:
        self.num_extra_inputs, self.num_extra_outputs = len(takes), len(gives)
        super().__init__()
        for n, channel in enumerate(takes):
            self.set_extra_input_channel(n, channel)
        for n, channel in enumerate(gives):
            name = channel.rstrip("!") if channel else channel
            self.set_extra_output_channel(n, name, output_to_caller=name == channel)


def run(*ops: Extra, scopes: Sequence[Any] | None = None, fused: bool = True) -> RoutedGroup:
    return RoutedGroup(ops, tuple(scopes or (0,) * len(ops)), fused=fused)


PLAIN = RoutedGroup((), (), name="ReLU")


# ---------------------------------------------------------------------- gradients


def needs(
    own: Sequence[Sequence[bool]],
    extras: Sequence[Sequence[Any]],
    *,
    x: bool,
    given: Sequence[bool] = (),
) -> list[Any]:
    sources = tuple(tuple(Slot(*s) if isinstance(s, tuple) else s for s in row) for row in extras)
    routing = Routing(sources, (), (), tuple(() for _ in own))
    return list(grad_needs([tuple(o) for o in own], routing, x, list(given)))


def test_nothing_is_owed_before_the_first_that_requires_grad() -> None:
    assert needs([[], [True, False], []], [[], [], []], x=False) == [
        None,
        GradNeeds(False, (True, False), ()),
        GradNeeds(True, (), ()),
    ]


def test_everything_is_owed_behind_an_input_that_requires_grad() -> None:
    assert needs([[], [False]], [[], []], x=True) == [
        GradNeeds(True, (), ()),
        GradNeeds(True, (False,), ()),
    ]


def test_nothing_is_owed_to_nobody() -> None:
    assert needs([[], [False]], [[], []], x=False) == [None, None]


def test_an_extra_input_of_the_caller_may_be_the_first() -> None:
    assert needs([[], [], []], [[0], [1], []], x=False, given=[False, True]) == [
        None,
        GradNeeds(False, (), (True,)),
        GradNeeds(True, (), ()),
    ]


def test_a_channel_owes_what_its_producer_owes() -> None:
    consumer = [(0, 0), (1, 0)]
    assert needs([[], [True], []], [[], [], consumer], x=False)[2] == GradNeeds(
        True, (), (False, True)
    )


# ---------------------------------------------------------------------- routing


def test_channels_stay_inside_a_run() -> None:
    a, b, c = Extra((), ("r!",)), Extra((None,), (None,)), Extra(("r",))
    (path,) = route([run(a, b, c)]).groups
    assert path.routing == Routing(
        sources=((), (0,), (Slot(0, 0),)),
        inputs=(Slot(1, 0),),
        outputs=(Slot(1, 0),),
        consumers=(((2,),), ((),), ()),
    )
    assert path.takes == (0,)
    assert path.gives == ((None, True),)


def test_a_channel_that_the_caller_gets_too() -> None:
    (path,) = route([run(Extra((), ("r",)), Extra(("r",)))]).groups
    assert path.routing is not None
    assert path.routing.outputs == (Slot(0, 0),)
    assert path.gives == ((None, True),)


def test_one_producer_and_several_consumers() -> None:
    (path,) = route([run(Extra((), ("r!",)), Extra(("r", "r")), Extra(("r",)))]).groups
    assert path.routing is not None
    assert path.routing.sources == ((), (Slot(0, 0), Slot(0, 0)), (Slot(0, 0),))
    assert path.routing.consumers[0] == ((1, 1, 2),)


def test_channels_cross_a_plain_module() -> None:
    routes = route([run(Extra((), ("r!", None))), PLAIN, run(Extra(("r", None)))])
    before, plain, after = routes.groups
    assert before.gives == ((Slot(0, 0), False), (None, True))
    assert plain.routing is None
    assert plain.takes == plain.gives == ()
    assert after.routing is not None
    assert after.routing.sources == ((0, 1),)
    assert after.takes == (Slot(0, 0), 0)
    assert routes.expects == ("op 1 (Extra)",)


def test_a_channel_read_inside_and_outside_its_run() -> None:
    routes = route([run(Extra((), ("r!",)), Extra(("r",))), run(Extra(("r",)))])
    first, second = routes.groups
    assert first.routing is not None
    assert first.routing.sources == ((), (Slot(0, 0),))
    assert first.routing.outputs == (Slot(0, 0),)
    assert first.gives == ((Slot(0, 0), False),)
    assert second.takes == (Slot(0, 0),)


def test_a_member_called_as_a_module_shows_all_its_extra_tensors() -> None:
    """An operation with hooks: even a channel to itself would have to leave it."""
    routes = route([run(Extra((), ("r!",)), fused=False), run(Extra(("r",)), fused=False)])
    one, two = routes.groups
    assert one.gives == ((Slot(0, 0), False),)
    assert two.takes == (Slot(0, 0),)


def test_extra_inputs_count_in_operation_order_over_members() -> None:
    nested = RoutedGroup((), (), 1, 2, False, "NestedSequential")
    routes = route([run(Extra((None, None))), nested, PLAIN, run(Extra((None,)))])
    assert [path.takes for path in routes.groups] == [(0, 1), (2,), (), (3,)]
    assert routes.groups[1].gives == ((None, True), (None, True))
    assert routes.expects == ("op 0 (Extra)", "op 0 (Extra)", "NestedSequential", "op 1 (Extra)")


def test_public_routing_knows_no_channels() -> None:
    assert public_routing([Extra((), ("r!",)), Extra(("r", None))]) == Routing(
        ((), (0, 1)), (Slot(1, 0), Slot(1, 1)), (Slot(0, 0),), (((),), ())
    )
    assert public_routing([Extra()]).trivial
    assert not public_routing([Extra(("r",))]).trivial


def test_private_channels_are_seen_in_their_scope_only() -> None:
    private = PrivateChannel("r")
    ops = [Extra((), (None,)), Extra((), (None,)), Extra((None,)), Extra((None,))]
    for op in ops[:2]:
        op.set_extra_output_channel(0, private, output_to_caller=False)
    for op in ops[2:]:
        op.set_extra_input_channel(0, private)
    (path,) = route([run(*ops, scopes="abab")]).groups
    assert path.routing is not None
    assert path.routing.sources[2:] == ((Slot(0, 0),), (Slot(1, 0),))
    with pytest.raises(ChannelError, match="multiple producers"):
        route([run(*ops, scopes="aaab")])
    with pytest.raises(ChannelError, match="no producer"):
        route([run(*ops, scopes="abcd")])


CHANNEL_ERRORS = {
    "no producer": (
        [run(Extra(("r",)))],
        "Channel 'r' has no producer (read by op 0 (Extra))",
    ),
    "no earlier producer": (
        [run(Extra(("r",))), run(Extra((), ("r",)))],
        "Channel 'r' has no earlier producer (read by op 0 (Extra), produced by op 1 (Extra))",
    ),
    "itself": (
        [run(Extra(("r",), ("r",)))],
        "Channel 'r' has no earlier producer (read by op 0 (Extra), produced by op 0 (Extra))",
    ),
    "multiple producers": (
        [run(Extra((), ("r",))), PLAIN, run(Extra((), ("r",)))],
        "Channel 'r' has multiple producers (op 0 (Extra) and op 1 (Extra))",
    ),
    "twice from one operation": (
        [run(Extra((), ("r", "r")))],
        "Channel 'r' has multiple producers (op 0 (Extra) and op 0 (Extra))",
    ),
}


@pytest.mark.parametrize("case", CHANNEL_ERRORS)
def test_texts_of_channel_errors(case: str) -> None:
    members, text = CHANNEL_ERRORS[case]
    with pytest.raises(ChannelError) as error:
        route(members)
    assert str(error.value).startswith(text)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("bind", "kind", "text"),
    [
        (
            lambda op: op.set_extra_input_channel(1, "r"),
            ChannelIndexError,
            "Extra input index 1 is out of range (Extra). Received: an operation with 1 extra",
        ),
        (lambda op: op.set_extra_input_channel(-1, "r"), ChannelIndexError, "out of range"),
        (
            lambda op: op.set_extra_output_channel(2, "r"),
            ChannelIndexError,
            "Extra output index 2 is out of range",
        ),
        (lambda op: op.set_extra_input_channel(0, ""), ChannelError, "non-empty string"),
        (
            lambda op: op.set_extra_output_channel(0, 3),
            ChannelError,
            "non-empty string or None (Extra). Received: 3",
        ),
        (
            lambda op: op.set_extra_output_channel(0, "r", output_to_caller=1),
            TypeError,
            "output_to_caller must be a bool (Extra). Received: 1",
        ),
    ],
)
def test_texts_of_binding_errors(bind: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as error:
        bind(Extra((None,), (None,)))
    assert text in str(error.value)


def test_unbinding_makes_an_extra_tensor_the_callers_again() -> None:
    op = Extra(("r",), ("s!",))
    assert op.set_extra_input_channel(0, None) is op
    assert op.set_extra_output_channel(0, None, output_to_caller=False) is op
    (path,) = route([run(op)]).groups
    assert path.takes == (0,)
    assert path.gives == ((None, True),)


@pytest.mark.parametrize(
    "capture", [OperationFuser, lambda ops: opfuser.Sequential(*ops)._resolve()]
)
def test_rebinding_after_capture_is_an_error(capture: Any) -> None:
    op = Extra((None,), (None,))
    capture([op])
    for bind in (op.set_extra_input_channel, op.set_extra_output_channel):
        with pytest.raises(ChannelCapturedError, match="already captured its channel routing"):
            bind(0, "r")


def test_a_copy_is_not_captured() -> None:
    op = Extra((None,))
    OperationFuser([op])
    assert copy.deepcopy(op).set_extra_input_channel(0, "r")


def _sources(seq: opfuser.Sequential) -> list[Any]:
    seq._resolve()
    (fuser,) = seq._module_groups
    return fuser._basic_op_extra_input_sources


def test_residuals_side_by_side_and_copies_of_them() -> None:
    one = opfuser.Residual(opfuser.Identity())
    seq = opfuser.Sequential(one, copy.deepcopy(one), copy.deepcopy(one))
    assert _sources(seq) == [[], [], [(0, 0)], [], [], [(3, 0)], [], [], [(6, 0)]]
    assert seq.num_extra_inputs == seq.num_extra_outputs == 0


def test_residuals_inside_residuals() -> None:
    inner = opfuser.Residual(opfuser.Identity())
    outer = opfuser.Residual(inner, opfuser.Residual(copy.deepcopy(inner)))
    assert _sources(outer) == [[], [], [], [(1, 0)], [], [], [], [(5, 0)], [(4, 0)], [(0, 0)]]


def test_a_residual_around_a_plain_module() -> None:
    seq = opfuser.Residual(torch.nn.ReLU())
    assert seq.num_extra_inputs == seq.num_extra_outputs == 0
    assert seq(torch.tensor([-1.0, 2.0])).tolist() == [-1.0, 4.0]


def test_the_parts_of_a_residual_keep_working_outside_of_it() -> None:
    """A slice of a residual lacks one end of the channel, which is an error, not silence."""
    with pytest.raises(ChannelError, match="'residual' has no producer"):
        opfuser.Residual(opfuser.Identity())[1:].num_extra_inputs  # noqa: B018 - resolves
