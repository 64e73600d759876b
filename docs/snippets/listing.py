# --8<-- [start:list]
import opfuser

for info in opfuser.fusions():
    state = "on" if info.enabled else f"off: {info.disabled_by}"
    print(info.name, info.stage, info.origin, state)
# --8<-- [end:list]
