"""FullyShardedDataParallel, with the GradScaler that its shards share."""

import torch
from by_hand import args
from ddp import main
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def shard(model):
    return FullyShardedDataParallel(model, device_id=torch.device(args.device), use_orig_params=True)


if __name__ == "__main__":
    main(shard, lambda: ShardedGradScaler(args.device, enabled=args.amp == "fp16"))
