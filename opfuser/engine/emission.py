"""The text of a program: a plan's steps as lines of Python, a function for each pass.

A line calls an operation; what does not change between calls is settled here: which tensors a step
reads and who made them, which contexts it needs, what its results are taken apart into. The text
consists of names that are made here. Classes and paths stand in comments alone.

Several emissions of one plan differ in what they do besides: checks of what a user's operations
return, ranges in profiles, code for torch.compile to trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..core.context import GradNeeds, new_context
from ..core.fusion import Stage
from ..core.op_base import BasicOperation
from ..core.op_base.kinds import is_built_in
from ..quantization.quantizers import Quantizer
from . import steps
from .lines import Lines, Text, listed, tuple_text
from .plan import Plan, Step, quantizers_between, span
from .ranges import place, range_of
from .routing import Routing, Slot, describe


class Emission(NamedTuple):
    """What a program does besides calling the operations.

    Attributes:
        verified: looks at what operations hand over.
        ranged: shows steps as ranges in a profile.
        traced: is traced by torch.compile, which must not depend on what was cached.
    """

    verified: bool = False
    ranged: bool = False
    traced: bool = False


PLAIN = Emission()
_UNQUANTIZED = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}


class Layout(NamedTuple):
    """What is known of a plan before its calls.

    Attributes:
        plan: the steps.
        routing: of extra tensors.
        needs: of each operation; one without any whose step runs in backward has needs, too.
        spans: where the parameters of each operation begin and end among all.
        reads: which of the kept parameters each operation's backward reads.
        paths: of the operations in their Sequential; empty where they stand in none.
    """

    plan: Plan
    routing: Routing
    needs: tuple[GradNeeds | None, ...]
    spans: tuple[tuple[int, int], ...]
    reads: tuple[tuple[int, int] | None, ...]
    paths: Sequence[str]


def step_name(step: Step) -> str:
    """How errors name a step."""
    return f"op {span(step.indices)} ({type(step.op).__name__})"


def _extra(slot: Slot) -> str:
    return f"y{slot.op}_{slot.slot}"


def _grad_of(slot: Slot) -> str:
    return f"dy{slot.op}_{slot.slot}"


@contextmanager
def _lines_of(
    lines: Lines, layout: Layout, emission: Emission, step: Step, stage: Stage
) -> Iterator[None]:
    """Within it, lines belong to a step: a comment comes first, and its range around all others."""
    lines.step = step
    lines(comment(layout.paths, step))
    if emission.ranged:
        bound = lines.bind(f"range{step.indices[0]}", (layout.paths, step, stage))
        with lines.block(f"with {lines.helper(range_of)}(*{bound}):"):
            yield
    else:
        yield
    lines.step = None


def comment(paths: Sequence[str], step: Step) -> str:
    """Indices, class and place of a step. Names of a user's may hold anything but a line's end."""
    where = place(paths, step)
    text = f"# {span(step.indices)} {step.name}" + (f": {where}" if where else "")
    return "".join(c if c.isprintable() else "?" for c in text)


def _is_plain(op: Any, extra_tensors: bool) -> bool:
    """Whether a step may skip the general protocol and call op_forward / op_backward directly."""
    return (
        not extra_tensors
        and isinstance(op, BasicOperation)
        and type(op).fuser_forward is BasicOperation.fuser_forward
        and type(op).fuser_backward is BasicOperation.fuser_backward
    )


def _quantizers(plan: Plan, stage: Stage) -> dict[int, Quantizer]:
    """How steps hand their results on in a pass, where as codes, by their first operations."""
    if stage == "forward":
        found = quantizers_between(plan.forward, stage, plan.env, plan.needs)
        return {step.indices[0]: quantizer for step, _, quantizer in found}
    found = quantizers_between(plan.backward, stage, plan.env, plan.needs)
    return {step.indices[0]: quantizer for _, step, quantizer in found}


def _has_extras(layout: Layout, step: Step) -> bool:
    routing = layout.routing
    return any(routing.sources[i] or routing.consumers[i] for i in step.indices)


def _outside(sources: tuple[Slot | int, ...], own: set[int]) -> tuple[Slot | int | None, ...]:
    """Sources of extra inputs; None for a channel whose producer the same step covers."""
    return tuple(None if isinstance(x, Slot) and x.op in own else x for x in sources)


class _Forward:
    """Writes the forward function."""

    def __init__(self, layout: Layout, emission: Emission) -> None:
        self.layout, self.emission = layout, emission
        self.lines = Lines()
        self.taped = any(need is not None for need in layout.plan.needs)
        last: dict[Slot, int] = {}
        routing = layout.routing
        for number, step in enumerate(layout.plan.forward):
            for i in step.indices:
                last.update((Slot(i, s), number) for s in range(len(routing.consumers[i])))
                last.update((x, number) for x in routing.sources[i] if isinstance(x, Slot))
        self.last_reader = {slot: n for slot, n in last.items() if slot not in routing.outputs}
        self.made: list[Slot] = []  # extra outputs that names hold at this line
        self.notes_output = {
            step.indices[-1]
            for step in layout.plan.backward
            if any(routing.consumers[i] for i in step.indices)
        }

    def text(self) -> Text:
        lines, layout = self.lines, self.layout
        behind, before = _quantizers(layout.plan, "forward"), _quantizers(layout.plan, "backward")
        with lines.block("def forward(x, extra_inputs, keywords, tape, verification):"):
            if layout.routing.inputs:
                lines(
                    tuple_text([f"e{n}" for n in range(len(layout.routing.inputs))])
                    + " = extra_inputs"
                )
            for number, step in enumerate(layout.plan.forward):
                first = step.indices[0]
                with _lines_of(lines, layout, self.emission, step, "forward"):
                    if self.emission.verified:
                        bound = lines.bind(f"name{number}", step_name(step))
                        lines(f"verification.before_forward({first}, {bound}, x)")
                    self.step(number, step, (before.get(first), behind.get(first)))
            lines(f"return x, {listed(map(_extra, layout.routing.outputs))}")
        return lines.text()

    def step(
        self, number: int, step: Step, quantizers: tuple[Quantizer | None, Quantizer | None]
    ) -> None:
        if _is_plain(step.op, _has_extras(self.layout, step) or quantizers != (None, None)):
            self.plain(step)
        else:
            self.general(number, step, quantizers)

    def context(self, i: int) -> str:
        """The name of the context of an operation, which lines make."""
        lines, op, need = self.lines, self.layout.plan.basic_ops[i], self.layout.needs[i]
        context, needs = f"c{i}", "None" if need is None else lines.bind(f"needs{i}", need)
        arguments = [needs]
        if type(op).make_settings is not BasicOperation.make_settings:
            now = "make_settings()" if self.emission.traced else "settings"
            arguments.append(f"{lines.bind(f'op{i}', op)}.{now}")
        lines.call(context, lines.helper(new_context), arguments)
        if self.emission.traced:
            lines(f"{context}.traced = True")
        return context

    def plain(self, step: Step) -> None:
        lines, (i,), op = self.lines, step.indices, self.lines.operation(step)
        context = self.context(i)
        unquantized = "**" + lines.bind("unquantized", _UNQUANTIZED)
        lines.call("x", f"{op}.op_forward", [context, "x", unquantized, f"**keywords[{i}]"])
        self.keep(step, [context])

    def general(
        self, number: int, step: Step, quantizers: tuple[Quantizer | None, Quantizer | None]
    ) -> None:
        lines, layout, op = self.lines, self.layout, self.lines.operation(step)
        routing, own = layout.routing, set(step.indices)
        contexts = list(map(self.context, step.indices))
        given = self.extra_inputs(step)
        done = [slot for slot, last in self.last_reader.items() if last == number]
        freed = [slot for slot in done if slot in self.made]
        if freed:  # before the call, which may then hold the only reference
            lines(f"given = {given}")
            lines(" = ".join(map(_extra, freed)) + " = None")
            given = "given"
        before, behind = quantizers
        handed = ["None", "None"]
        if before is not None:
            handed[0] = lines.bind(f"grad_quantizer{number}", before)
        if behind is not None:
            handed[1] = (
                f"{lines.helper(steps.unless_watched)}({lines.bind(f'quantizer{number}', behind)})"
            )
        arguments = [
            listed(contexts),
            "x",
            f"basic_op_extra_inputs={given}",
            f"prev_op_grad_output_quantizer={handed[0]}",
            f"next_op_input_quantizer={handed[1]}",
            f"basic_op_kwargs=keywords[{step.indices[0]}:{step.indices[-1] + 1}]",
        ]
        slots = [Slot(i, s) for i in step.indices for s in range(len(routing.consumers[i]))]
        if is_built_in(step.op) and not slots:
            lines.call("x, _", f"{op}.fuser_forward", arguments)
        else:
            results = lines.bind(f"results{number}", self.results(step, own))
            names = ", ".join(["x", *map(_extra, slots)]) + ("" if slots else ",")
            lines.call(names, f"{op}.fuser_forward", arguments, f"{results}.of")
        if freed:
            lines("given = None")
        self.made = [slot for slot in [*self.made, *slots] if slot not in done]
        unread = [slot for slot in slots if slot in done]
        if unread:
            lines(" = ".join(map(_extra, unread)) + " = None")
        self.keep(step, contexts)

    def keep(self, step: Step, contexts: Sequence[str]) -> None:
        """Lines that put the contexts of a step on the tape, if there is one."""
        if not self.taped:  # what an operation has saved nevertheless is freed
            self.lines(" = ".join(contexts) + " = None")
            return
        # For a backward that may need zeros as the gradient of the output.
        if step.indices[-1] in self.notes_output and not self.emission.traced:
            self.lines(f"{contexts[-1]}._output_like = x.shape, x.dtype, x.device")
        self.lines(f"tape.add({', '.join(contexts)})")

    def extra_inputs(self, step: Step) -> str:
        """The lists of extra inputs. None stands for a channel that the step covers itself."""
        rows = []
        for i in step.indices:
            sources = _outside(self.layout.routing.sources[i], set(step.indices))
            need = self.layout.plan.needs[i]
            asks = (False,) * len(sources)
            if need is not None and not is_built_in(step.op):
                asks = tuple(isinstance(s, Slot) and n for s, n in zip(sources, need.extra_inputs))
            rows.append(listed(map(self.source, sources, asks)) if sources else "()")
        return listed(rows)

    def source(self, source: Slot | int | None, asks: bool) -> str:
        if source is None:
            return "None"
        if isinstance(source, int):
            return f"e{source}"
        return f"{self.lines.helper(steps.asking)}({_extra(source)})" if asks else _extra(source)

    def results(self, step: Step, own: set[int]) -> steps.ForwardResults:
        routing = self.layout.routing
        wanted = [
            tuple(
                "public" if Slot(i, s) in routing.outputs
                else "outside" if any(reader not in own for reader in readers)
                else ""
                for s, readers in enumerate(routing.consumers[i])
            )
            for i in step.indices
        ]  # fmt: skip
        return steps.ForwardResults(step_name(step), step.indices, tuple(wanted))


def emit_forward(layout: Layout, emission: Emission = PLAIN) -> Text:
    """The function of a forward pass.

    Its arguments are the input, the extra inputs, the keywords of each operation, the ``Tape`` that
    records what backward needs and the ``Verification``; the last two are None where they are not
    asked for. It returns the output and the list of the extra outputs.
    """
    return _Forward(layout, emission).text()


class _Backward:
    """Writes the backward function."""

    def __init__(self, layout: Layout, emission: Emission) -> None:
        self.layout, self.emission = layout, emission
        self.lines = Lines()
        self.given = set(layout.routing.outputs)  # slots whose gradient a name may hold
        self.kept = sum(stop - start for start, stop in filter(None, layout.reads))

    def text(self) -> Text:
        lines, layout = self.lines, self.layout
        quantizers = _quantizers(layout.plan, "backward")
        count = layout.spans[-1][1] if layout.spans else 0
        results = [f"g{n}" for n in range(count)]
        results += [f"de{n}" for n in range(len(layout.routing.inputs))]
        with lines.block("def backward(dx, received, contexts, saved, verification):"):
            slots = [
                Slot(i, s)
                for i, row in enumerate(layout.routing.consumers)
                for s in range(len(row))
            ]
            outputs = layout.routing.outputs
            unset = [*results, *[_grad_of(slot) for slot in slots if slot not in outputs]]
            for start in range(0, len(unset), 8):
                lines(" = ".join([*unset[start : start + 8], "None"]))
            if outputs:
                lines(tuple_text(list(map(_grad_of, outputs))) + " = received")
            for step in reversed(layout.plan.backward):
                if all(layout.plan.needs[i] is None for i in step.indices):
                    break
                first = step.indices[0]
                with _lines_of(lines, layout, self.emission, step, "backward"):
                    self.step(step, quantizers.get(first))
                    if self.emission.verified:
                        bound = lines.bind(f"name{first}", step_name(step))
                        lines(f"verification.after_backward({first}, {bound}, dx)")
            needs = next(iter(layout.plan.needs), None)
            dx = "dx" if needs is not None and needs.input else "None"
            lines(f"return {listed([dx, *results])}")
        return lines.text()

    def revived(self, i: int) -> str:
        arguments, reads = [f"contexts[{i}]", "saved"], self.layout.reads[i]
        if reads is not None:  # which parameters that stand behind all that was saved
            start, stop = (n - self.kept for n in reads)
            arguments.append(f"saved[{start}:{stop or ''}]")
        return f"{self.lines.helper(steps.revived)}({', '.join(arguments)})"

    def step(self, step: Step, quantizer: Quantizer | None) -> None:
        """Lines that run a step, if a gradient reaches it."""
        if not self.may_lack_zeros(step):
            self.whole(step, quantizer)
            return
        with self.lines.block("if dx is None:"):
            for i in reversed(step.indices):
                self.whole(Step(self.layout.plan.basic_ops[i], (i,)), None)
        with self.lines.block("else:"):
            self.whole(step, quantizer)

    def may_lack_zeros(self, step: Step) -> bool:
        """Whether extra outputs may have gradients while nobody knows zeros for the output.

        Where forward makes it on the way, its shape is not known.
        """
        if len(step.indices) == 1 or not any(
            self.layout.routing.consumers[i] for i in step.indices
        ):
            return False
        made = {step.indices[-1] for step in self.layout.plan.forward}
        return self.emission.traced or step.indices[-1] not in made

    def whole(self, step: Step, quantizer: Quantizer | None) -> None:
        """Lines that run a step, where zeros are known."""
        lines = self.lines
        slots = [
            [Slot(i, s) for s in range(len(self.layout.routing.consumers[i]))] for i in step.indices
        ]
        if _is_plain(step.op, _has_extras(self.layout, step) or quantizer is not None):
            with lines.block("if dx is not None:"):
                self.plain(step)
            return
        contexts = [self.revived(i) for i in step.indices]
        if quantizer is not None:
            bound = lines.bind(f"grad_quantizer{step.indices[0]}", quantizer)
            contexts[0] = f"{lines.helper(steps.handing_codes_on)}({contexts[0]}, {bound})"
        if any(slots):
            lines(f"contexts_of_step = {listed(contexts)}")
            lines(f"given = {listed(listed(map(_grad_of, row)) if row else '()' for row in slots)}")
            lines(" = ".join(_grad_of(slot) for row in slots for slot in row) + " = None")
            zero = lines.helper(steps.zero_or_none)
            with lines.block("if dx is None:"):
                lines(f"dx = {zero}(contexts_of_step[-1], given)")
            with lines.block("if dx is not None:"):
                self.general(step, "contexts_of_step", "given")
            lines("contexts_of_step = given = None")
        else:
            with lines.block("if dx is not None:"):
                self.general(step, listed(contexts), listed("()" for _ in step.indices))

    def plain(self, step: Step) -> None:
        lines, (i,), op = self.lines, step.indices, self.lines.operation(step)
        names, around = f"dx, {self.parameter_grads(i)}", ""
        if not is_built_in(step.op):
            around = f"{self.results(step)}.of_one"
        lines.call(names, f"{op}.op_backward", [self.revived(i), "dx"], around)

    def parameter_grads(self, i: int) -> str:
        start, stop = self.layout.spans[i]
        return tuple_text([f"g{n}" for n in range(start, stop)])

    def results(self, step: Step) -> str:
        """The name of what takes the results of a step apart."""
        spans, sources = self.layout.spans, self.layout.routing.sources
        found = steps.BackwardResults(
            step_name(step),
            tuple((i, describe(i, self.layout.plan.basic_ops[i])) for i in step.indices),
            tuple(spans[i][1] - spans[i][0] for i in step.indices),
            tuple(
                tuple(source is not None for source in _outside(sources[i], set(step.indices)))
                for i in step.indices
            ),
        )
        # That of an operation which a step covers has another name than that of the step.
        return self.lines.bind(
            f"result{'s' if len(step.indices) > 1 else ''}{step.indices[0]}", found
        )

    def general(self, step: Step, contexts: str, given: str) -> None:
        lines, layout, op = self.lines, self.layout, self.lines.operation(step)
        own, routing = set(step.indices), layout.routing
        results = self.results(step)
        flat = [f"g{n}" for i in step.indices for n in range(*layout.spans[i])]
        sums: list[tuple[str, str]] = []
        for i in step.indices:
            for s, target in enumerate(_outside(routing.sources[i], own)):
                if target is None:
                    continue
                if isinstance(target, int):
                    flat.append(f"de{target}")
                elif target in self.given:
                    flat.append(f"d{i}_{s}")
                    sums.append((_grad_of(target), f"d{i}_{s}"))
                else:
                    self.given.add(target)
                    flat.append(_grad_of(target))
        names, of_output = ", ".join(["dx", *flat]) + ("" if flat else ","), "dx"
        if step.op.frees_output_grad:
            lines("of_output = [dx]")
            lines("dx = None")
            of_output = "of_output.pop()"
        arguments = [contexts, of_output, f"basic_op_grad_extra_outputs={given}"]
        lines.call(names, f"{op}.fuser_backward", arguments, f"{results}.of")
        for total, addend in sums:
            lines(f"{total} = {lines.helper(steps.summed)}({total}, {addend})")
        if sums:
            lines(" = ".join(addend for _, addend in sums) + " = None")


def emit_backward(layout: Layout, emission: Emission = PLAIN) -> Text:
    """The function of a backward pass.

    Its arguments are the gradient of the output, those of the extra outputs, the contexts of
    forward, the list of what it saved (emptied on the way), and the ``Verification`` or None. It
    returns the list of the gradients of the input, of parameters and of extra inputs.
    """
    return _Backward(layout, emission).text()
