"""What torchrun starts on two CPU ranks: DistributedDataParallel, a sampler for each rank, and sums over all ranks."""

import torch
import torch.distributed as dist
from by_hand import args, autocast, grad_scaler, log
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(9)
    data = TensorDataset(torch.randn(args.steps * 8, 5), torch.randint(3, (args.steps * 8,)))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 3)))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), grad_scaler()
    for inputs, targets in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
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
