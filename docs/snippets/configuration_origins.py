# --8<-- [start:origins]
import opfuser
from opfuser.registry import effective

with (
    opfuser.fusion_config({"joint": {"norm_linear": {"min_numel": 4096}}}),
    opfuser.enable("recompute_mlp"),
):
    for row in effective():
        if row.name in ("norm_linear", "recompute_mlp"):
            print(row.name, row.setting, row.value, "from", row.origin)
# --8<-- [end:origins]
