# --8<-- [start:error]
import opfuser

try:
    opfuser.fusion_config({"joint": {"norm_liner": {"enabled": False}}})
except opfuser.errors.ConfigError as error:
    print(error)
# --8<-- [end:error]
