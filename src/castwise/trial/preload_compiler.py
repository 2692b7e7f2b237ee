"""What the forkserver imports, too, if trials compile: torch imports its compiler when it first compiles, in seconds.

What they would look up once each is looked up here: the backends, and the digests of torch's and Triton's files.
"""

import importlib

from torch._dynamo import lookup_backend
from torch._inductor.codecache import torch_key
from torch._inductor.codegen.common import init_backend_registration
from torch._inductor.runtime.triton_compat import triton_key

importlib.import_module("torch._inductor.compile_fx")
lookup_backend("inductor")
init_backend_registration()
torch_key()
triton_key()  # raises an error without Triton, after all else
