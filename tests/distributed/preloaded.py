"""What ranks import, once for all of them: they are forks of a process that has imported this.

Of nearly three seconds that a rank computed for a check of a few milliseconds, two were imports.
"""

from __future__ import annotations

import gc

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401

import opfuser.fused
import opfuser.models  # noqa: F401
import tests.distributed.ranks  # noqa: F401

gc.freeze()  # or the first look for garbage of every fork would copy all of its memory
