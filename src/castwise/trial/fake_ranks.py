"""Ranks that are not there: a script's one rank in a group of torch's fake backend, whose collectives do nothing."""

import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor, distributed, nn
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from castwise.errors import UsageError
from castwise.trial.script.replacing import on_import


def fake_ranks(note_gradient: Callable[[Tensor], None]) -> list[tuple[Any, str, Any]]:
    """Return what a script sees of other ranks: an object, the attribute, and what takes its place.

    `note_gradient` gets the buckets of DistributedDataParallel, which hold all gradients a second time, or are them.
    """
    begin, add_group = distributed.init_process_group, distributed.new_group
    on_import("torch.distributed.fsdp", _refuse)

    class Buckets:
        """Stands for DistributedDataParallel's reducer, which waits for torch's engine."""

        def __init__(self, weights: Sequence[Tensor], groups: Sequence[Sequence[int]], *others: Any) -> None:
            self._buckets: list[Any] = []  # the gradients are views of them if others[5], `gradient_as_bucket_view`
            for own in ([weights[index] for index in group] for group in groups):
                sizes = [weight.numel() for weight in own]
                self._buckets.append(own[0].new_empty(sum(sizes)))
                note_gradient(self._buckets[-1])
                for weight, view in zip(own, self._buckets[-1].split(sizes), strict=True) if others[5] else ():
                    weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        lambda weight, view=view: setattr(weight, "grad", view.view_as(weight))
                    )

        def __getattr__(self, _: str) -> Any:
            return _nothing

    def join(*_: Any, world_size: int = 1, rank: int = 0, **__: Any) -> None:
        size, number = os.environ.get("WORLD_SIZE", world_size), os.environ.get("RANK", rank)
        begin("fake", store=FakeStore(), rank=int(number), world_size=int(size))

    seen = {
        "init_process_group": join,
        "new_group": lambda ranks=None, *_, **__: add_group(ranks, backend="fake"),
        "is_nccl_available": lambda: True,
    }
    of_ddp = "_verify_params_across_processes _broadcast_coalesced _register_comm_hook _register_builtin_comm_hook"
    return [
        *((owner, name, each) for name, each in seen.items() for owner in (distributed, distributed_c10d)),
        *((distributed, name, _nothing) for name in of_ddp.split()),
        (nn.parallel.DistributedDataParallel, "_set_static_graph", _nothing),
        (distributed, "Reducer", Buckets),
        (distributed, "Logger", lambda reducer: reducer),
    ]


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _refuse(module: ModuleType) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UsageError("FSDP shares out the weights, which is not traced")

    module.fully_shard, module.FullyShardedDataParallel.__init__ = refuse, refuse  # type: ignore[attr-defined]
