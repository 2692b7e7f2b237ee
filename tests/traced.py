"""torch.compile without its last part: a C++ compiler takes a second for each kernel, and a model has dozens."""

from typing import Any

from torch import fx
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch._inductor import compile_fx


def run_graph(graph: fx.GraphModule, inputs: Any, **_: Any) -> Any:
    """Return what runs the graph that Inductor makes code of: traced, made functional and taken apart by its rules."""
    return aot_eager_decomp_partition(graph, inputs)


def trace_only() -> None:
    """Let what this process compiles run as graphs; the fixture `traced` undoes it."""
    compile_fx.compile_fx = run_graph


def traces_only() -> bool:
    return compile_fx.compile_fx is run_graph
