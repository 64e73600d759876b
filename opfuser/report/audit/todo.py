"""What a model could fuse and does not, as a document: schema ``opfuser.fusion_todo/1``."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from ...core.fusion import Refusal
from ...errors import NotSupportedError
from .kernels import Existing

SCHEMA = "opfuser.fusion_todo/1"


class Estimate(NamedTuple):
    """What one fused operation would save, counted from shapes.

    Attributes:
        launches_saved: kernels that one call launches less, in forward and backward; less than 0
            if it launches more.
        bytes_saved_per_call: bytes that one call moves less through memory, in both, and bytes
            that it keeps less for backward. What it moves or keeps more is not taken away: the next
            two have that. The mean where sites differ, as everywhere.
        calls_per_step: calls of all sites in one forward of the model, and its backward.
        bytes_moved_change: bytes that one call moves more; less than 0 if it moves less.
        bytes_kept_change: bytes that one call keeps more for backward, likewise.
        measured: what was measured; nothing is, so far.
    """

    launches_saved: int
    bytes_saved_per_call: int
    calls_per_step: int
    bytes_moved_change: int
    bytes_kept_change: int
    measured: None = None


class Instance(NamedTuple):
    """One site.

    Attributes:
        op_loc: path of the module, and the line of the source or the operations.
        module_segment: of the source of a plain module, the statements; of a Sequential, its
            modules as Python prints them.
        plan_segment: of a plain module, its nodes as FX prints them; of a Sequential, the steps of
            its plan.
        notes: where it is, what it comes from, and what would fuse it.
    """

    op_loc: str
    module_segment: str
    plan_segment: str
    notes: str


class MissedFusion(NamedTuple):
    """A fused operation that would compute what several operations of the model do.

    Attributes:
        fused_op: its name.
        source: who has it: "opfuser", "plugin", "torch", "triton" or "cuda".
        stage: "forward", "backward" or "joint".
        component_ops: what it would replace, in order.
        existing_kernel: what was looked up.
        recommendation: "use_existing_kernel", "needs_triton", or "defer" where something has to be
            decided first, or where a fusion costs more bytes than it saves.
        blocked_by: what keeps a registered fusion from matching; None if none is registered.
        numeric_risk: how results may change.
        estimate: of all sites.
        instances: every site.
    """

    fused_op: str
    source: str
    stage: str
    component_ops: tuple[str, ...]
    existing_kernel: Existing
    recommendation: str
    blocked_by: Refusal | None
    numeric_risk: str
    estimate: Estimate
    instances: tuple[Instance, ...]

    @property
    def weight(self) -> tuple[int, int]:
        """By which the document is ordered: bytes, then launches, that a step saves."""
        calls = self.estimate.calls_per_step
        return calls * self.estimate.bytes_saved_per_call, calls * self.estimate.launches_saved


class Todo(NamedTuple):
    """The missed fusions of a model, those that save most bytes in a step first.

    Attributes:
        model: its name.
        env: what it was audited with: versions, device, dtype, mode, inputs.
        missed_fusions: none if there is nothing to fuse.
    """

    model: str
    env: dict[str, Any]
    missed_fusions: tuple[MissedFusion, ...]

    def as_data(self) -> dict[str, Any]:
        """Plain data: dicts, lists, texts, numbers and None."""
        return {
            "schema": SCHEMA,
            "input": {"model": self.model, "env": self.env},
            "missed_fusions": [_plain(missed) for missed in self.missed_fusions],
        }

    def as_yaml(self) -> str:
        """One YAML document, which ``yaml.safe_load`` reads.

        Raises:
            NotSupportedError: PyYAML is not installed.
        """
        try:
            yaml: Any = importlib.import_module("yaml")
        except ImportError as error:
            raise NotSupportedError.explained(
                "An audit is written by PyYAML", remedy="Install opfuser[tools]"
            ) from error

        # The one in C, where PyYAML was built with it.
        class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # PyYAML is looked up
            """Writes texts of several lines as such, and nothing by reference."""

            def ignore_aliases(self, data: Any) -> bool:
                return True

        def text(dumper: Any, value: str) -> Any:
            style = "|" if "\n" in value else None
            return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

        Dumper.add_representer(str, text)
        out: str = yaml.dump(
            self.as_data(), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100
        )
        return out


def _plain(value: Any) -> Any:
    """NamedTuples as dicts, other tuples as lists."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, Iterable) and not isinstance(value, (str, dict)):
        return [_plain(item) for item in value]
    return value
