# --8<-- [start:operation]
import torch

from opfuser import PointwiseOperation


class Swish(PointwiseOperation):
    """y = x * sigmoid(beta * x) (Ramachandran et al., Searching for Activation Functions, 2017)."""

    device_function = "pointwise_device:swish"

    def value(self, x):
        (beta,) = self.constants
        return x * torch.sigmoid(beta * x)


# --8<-- [end:operation]
