# --8<-- [start:lora]
import peft

import opfuser

config = peft.LoraConfig(target_modules=["up", "down"])
config._register_custom_module({opfuser.Linear: peft.tuners.lora.Linear})

layers = {"up": opfuser.Linear(64, 256), "act": opfuser.GELU(), "down": opfuser.Linear(256, 64)}
model = peft.get_peft_model(opfuser.Sequential(layers), config)
# --8<-- [end:lora]
assert sum(p.requires_grad for p in model.parameters()) == 4
