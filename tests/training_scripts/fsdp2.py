"""fully_shard, whose gradients a GradScaler looks through on all ranks."""

import torch.distributed as dist
from by_hand import args
from ddp import main
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def shard(model):
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    for part in (model[0], model):
        fully_shard(part, mesh=mesh)
    for part in model.modules():
        if args.device == "cpu" and isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    return model


if __name__ == "__main__":
    main(shard)
