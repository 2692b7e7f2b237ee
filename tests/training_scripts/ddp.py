"""What torchrun starts on two CPU ranks: DistributedDataParallel, a sampler for each rank, and sums over all ranks.

fsdp.py and fsdp2.py train the same model sharded.
"""

import os

import torch
import torch.distributed as dist
from by_hand import SAMPLES, More, args, autocast, grad_scaler, log, moved
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(spread=DistributedDataParallel, make_scaler=grad_scaler):
    dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
    n = args.size
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(9)
    count = args.steps * 8 * SAMPLES
    data = TensorDataset(torch.randn(count, 5), torch.randint(3, (count,)))
    model = spread(nn.Sequential(nn.Linear(5, 24 * n), nn.ReLU(), More(24 * n), nn.Linear(24 * n, 3)).to(args.device))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1 / n, momentum=0.9), make_scaler()
    for inputs, targets in moved(DataLoader(data, batch_size=4 * SAMPLES, sampler=DistributedSampler(data))):
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        log(mean / dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
