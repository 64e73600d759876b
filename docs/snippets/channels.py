# --8<-- [start:extra]
import torch

from opfuser import AddExtraInput, Linear, MakeExtraOutput, Residual, Sequential

x, z = torch.randn(2, 8), torch.randn(2, 8)

add = Sequential(Linear(8, 8), AddExtraInput())
y = add(x, z)  # extra inputs follow the input, in operation order

tap = Sequential(Linear(8, 8), MakeExtraOutput(), Linear(8, 8))
y, hidden = tap(x)  # extra outputs follow the output, in operation order
# --8<-- [end:extra]
assert add.num_extra_inputs == 1
assert tap.num_extra_outputs == 1

# --8<-- [start:channel]
tap = MakeExtraOutput()
tap.set_extra_output_channel(0, "skip", output_to_caller=False)
add = AddExtraInput()
add.set_extra_input_channel(0, "skip")

model = Sequential(tap, Linear(8, 8), add)
y = model(x)  # x + linear(x): the extra tensor stays inside
# --8<-- [end:channel]
torch.testing.assert_close(y, x + model[1](x))

# --8<-- [start:residual]
model = Sequential(Residual(Linear(8, 8)), Residual(Linear(8, 8), Residual(Linear(8, 8))))
# --8<-- [end:residual]
assert model.num_extra_inputs == model.num_extra_outputs == 0
model(x)


# --8<-- [start:shared]
def read(channel):
    return AddExtraInput().set_extra_input_channel(0, channel)


tap = MakeExtraOutput().set_extra_output_channel(0, "input")  # the caller gets it, too
model = Sequential(tap, Linear(8, 8), torch.nn.Tanh(), read("input"), Linear(8, 8), read("input"))
y, same_as_x = model(x)
# --8<-- [end:shared]
torch.testing.assert_close(same_as_x, x)
h = torch.tanh(model[1](x)) + x
torch.testing.assert_close(y, model[4](h) + x)

# --8<-- [start:error]
try:
    Sequential(Linear(8, 8), read("inptu"))(x)
except ValueError as error:
    print(error)
# --8<-- [end:error]
