"""Which gradients are owed, and where extra tensors go."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest

import opfuser
from opfuser.engine.planning import GradNeeds, grad_needs
from opfuser.engine.routing import (
    ExtraOutput,
    PrivateChannel,
    RoutedGroup,
    Routing,
    Slot,
    public_routing,
    route,
)
from opfuser.errors import ChannelError
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


def group(*ops: Extra, scopes: Sequence[Any] | None = None, fused: bool = True) -> RoutedGroup:
    return RoutedGroup(ops, tuple(scopes or (0,) * len(ops)), fused=fused)


PLAIN = RoutedGroup((), (), name="ReLU")


# Gradients.


NO, YES = False, True


@pytest.mark.parametrize(
    ("own", "extras", "x", "given", "expected"),
    [
        # Nothing is owed before the first that requires grad.
        ([[], [YES, NO], []], [[], [], []], NO, [],
         [None, GradNeeds(NO, (YES, NO), ()), GradNeeds(YES, (), ())]),
        # Everything is owed behind an input that requires grad.
        ([[], [NO]], [[], []], YES, [], [GradNeeds(YES, (), ()), GradNeeds(YES, (NO,), ())]),
        ([[], [NO]], [[], []], NO, [], [None, None]),
        # An extra input of the caller may be the first.
        ([[], [], []], [[0], [1], []], NO, [NO, YES],
         [None, GradNeeds(NO, (), (YES,)), GradNeeds(YES, (), ())]),
        # A channel owes what its producer owes.
        ([[], [YES], []], [[], [], [Slot(0, 0), Slot(1, 0)]], NO, [],
         [None, GradNeeds(NO, (YES,), ()), GradNeeds(YES, (), (NO, YES))]),
    ],
)  # fmt: skip
def test_which_gradients_are_owed(
    own: Any, extras: Any, x: bool, given: Any, expected: Any
) -> None:
    routing = Routing(tuple(map(tuple, extras)), (), (), tuple(() for _ in own))
    assert list(grad_needs([tuple(o) for o in own], routing, x, given)) == expected


# Routing.


def test_channels_stay_inside_a_group() -> None:
    a, b, c = Extra((), ("r!",)), Extra((None,), (None,)), Extra(("r",))
    (path,) = route([group(a, b, c)]).groups
    assert path.routing == Routing(
        sources=((), (0,), (Slot(0, 0),)),
        inputs=(Slot(1, 0),),
        outputs=(Slot(1, 0),),
        consumers=(((2,),), ((),), ()),
    )
    assert path.takes == (0,)
    assert path.gives == ((None, True),)


def test_channels_cross_a_plain_module() -> None:
    routes = route([group(Extra((), ("r!", None))), PLAIN, group(Extra(("r", None)))])
    before, plain, after = routes.groups
    assert before.gives == ((Slot(0, 0), False), (None, True))
    assert plain.routing is None
    assert plain.takes == plain.gives == ()
    assert after.routing is not None
    assert after.routing.sources == ((0, 1),)
    assert after.takes == (Slot(0, 0), 0)
    assert routes.expects == ("op 1 (Extra)",)


def test_a_channel_read_inside_and_outside_its_group() -> None:
    routes = route([group(Extra((), ("r!",)), Extra(("r",))), group(Extra(("r",)))])
    first, second = routes.groups
    assert first.routing is not None
    assert first.routing.sources == ((), (Slot(0, 0),))
    assert first.routing.outputs == (Slot(0, 0),)
    assert first.gives == ((Slot(0, 0), False),)
    assert second.takes == (Slot(0, 0),)


def test_a_member_called_as_a_module_shows_all_its_extra_tensors() -> None:
    """An operation with hooks: even a channel to itself would have to leave it."""
    routes = route([group(Extra((), ("r!",)), fused=False), group(Extra(("r",)), fused=False)])
    one, two = routes.groups
    assert one.gives == ((Slot(0, 0), False),)
    assert two.takes == (Slot(0, 0),)


def test_extra_inputs_count_in_operation_order_over_members() -> None:
    nested = RoutedGroup((), (), (None,), (ExtraOutput(None, True),) * 2, False, "Nested")
    routes = route([group(Extra((None, None))), nested, PLAIN, group(Extra((None,)))])
    assert [path.takes for path in routes.groups] == [(0, 1), (2,), (), (3,)]
    assert routes.groups[1].gives == ((None, True), (None, True))
    assert routes.expects == ("op 0 (Extra)", "op 0 (Extra)", "Nested", "op 1 (Extra)")


def test_public_routing_knows_no_channels() -> None:
    assert public_routing([Extra((), ("r!",)), Extra(("r", None))]) == Routing(
        ((), (0, 1)), (Slot(1, 0), Slot(1, 1)), (Slot(0, 0),), (((),), ())
    )
    assert public_routing([Extra()]) == Routing(((),), (), (), ((),))


def test_private_channels_are_seen_in_their_scope_only() -> None:
    private = PrivateChannel("r")
    ops = [Extra((), (None,)), Extra((), (None,)), Extra((None,)), Extra((None,))]
    for op in ops[:2]:
        op.set_extra_output_channel(0, private, output_to_caller=False)
    for op in ops[2:]:
        op.set_extra_input_channel(0, private)
    (path,) = route([group(*ops, scopes="abab")]).groups
    assert path.routing is not None
    assert path.routing.sources[2:] == ((Slot(0, 0),), (Slot(1, 0),))
    with pytest.raises(ChannelError, match="multiple producers"):
        route([group(*ops, scopes="aaab")])
    with pytest.raises(ChannelError, match="no producer"):
        route([group(*ops, scopes="abcd")])


@pytest.mark.parametrize(
    ("takes", "gives", "text"),
    [
        (("r",), (None,), "no producer (read by op 0 (Extra))"),
        (("r",), ("r",),
         "no earlier producer (read by op 0 (Extra), produced by op 0 (Extra))"),
        ((None,), ("r", "r"), "multiple producers (op 0 (Extra) and op 0 (Extra))"),
    ],
)  # fmt: skip
def test_an_operation_that_does_not_fit_itself(takes: Any, gives: Any, text: str) -> None:
    with pytest.raises(ChannelError) as error:
        route([group(Extra(takes, gives))])
    assert str(error.value).startswith(f"Channel 'r' has {text}")


def test_a_copy_is_not_captured() -> None:
    op = Extra((None,))
    OperationFuser([op])
    assert copy.deepcopy(op).set_extra_input_channel(0, "r")


def test_the_parts_of_a_residual_keep_working_outside_of_it() -> None:
    """A slice of a residual lacks one end of the channel, which is an error, not silence."""
    with pytest.raises(ChannelError, match="'residual' has no producer"):
        opfuser.Residual(opfuser.Identity())[1:].num_extra_inputs  # noqa: B018 - resolves
