"""What validation reads of batch norms, after a few steps in loops that compute it otherwise."""

from contextlib import ExitStack

import pytest
import torch
from real_gpu import on_gpus
from torch import Tensor, nn

from castwise.registry.techniques import join
from castwise.registry.workloads import find_workload
from castwise.spec.trial import TrialSpec
from castwise.trial.build import build_trial
from castwise.trial.data.sharding import rank_batches
from castwise.trial.distributed import Peers

pytestmark = on_gpus()

DEVICE = "cuda:0"
NUM_STEPS = 40
# Of a layer's channels in the mean. By rounding; with dropout each loop draws its own.
BOUNDS = {"resnet18": 0.01, "wrn-28-10": 0.15}


def statistics_after_steps(workload: str, *techniques: str) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Train with the weights held still, in float32; return running means, variances, and what validation computes."""
    spec = TrialSpec(
        workload=workload, precision="fp32", loss_scale="none", batch_size=16, device=DEVICE, techniques=techniques
    )
    with ExitStack() as stack:
        setup = build_trial(spec, stack, Peers())
        for group in setup.step.optimizer.param_groups:
            group["lr"] = group["lr"] * 0 if isinstance(group["lr"], Tensor) else 0.0
            group["weight_decay"] = 0.0
        batches = rank_batches(find_workload(workload), setup.task, spec, 4, Peers())
        batches = [setup.prepare(batch) if setup.prepare else batch for batch in batches]
        for index in range(NUM_STEPS):
            setup.step(batches[index % 4])
        norms = [module for module in setup.step.model.modules() if isinstance(module, nn.BatchNorm2d)]
        means, variances = (
            [each.detach().double().cpu() for each in side]
            for side in zip(*((norm.running_mean, norm.running_var) for norm in norms), strict=True)
        )
        model = setup.step.model.eval()
        with torch.no_grad():
            return means, variances, model(batches[0][0]).double().cpu()


@pytest.mark.parametrize("workload", ["resnet18", "wrn-28-10"])
@pytest.mark.parametrize(
    "techniques",
    [
        ("channels-last", "batch-norm-kernel"),
        ("channels-last", "batch-norm-kernel", "compile"),
        ("channels-last", "batch-norm-kernel", "cuda-graph"),
        ("channels-last", "batch-norm-kernel", "compile", "cuda-graph"),
        ("channels-last", "compile", "cuda-graph"),
    ],
    ids=join,
)
def test_running_statistics_and_validation_are_the_plain_loop_s(workload: str, techniques: tuple[str, ...]) -> None:
    means, variances, logits = statistics_after_steps(workload, *techniques)
    plain_means, plain_variances, plain_logits = statistics_after_steps(workload)
    bound = BOUNDS[workload]
    for mean, variance, plain_mean, plain_variance in zip(means, variances, plain_means, plain_variances, strict=True):
        assert ((mean - plain_mean).abs() / plain_variance.sqrt()).mean() < bound
        assert (variance / plain_variance).log().abs().mean() < bound
    assert (logits - plain_logits).abs().mean() < 2 * bound * plain_logits.abs().mean()
