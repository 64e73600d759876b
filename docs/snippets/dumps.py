# --8<-- [start:dump]
import os
import tempfile
from pathlib import Path

import torch

from opfuser import Linear, Residual

folder = os.environ["OPFUSER_DUMP_DIR"] = tempfile.mkdtemp()
Residual(Linear(64, 64))(torch.randn(8, 64))
for path in sorted(Path(folder).glob("*_forward_linear_bias_add.txt")):
    print(path.name, path.read_text(), sep="\n")
# --8<-- [end:dump]
