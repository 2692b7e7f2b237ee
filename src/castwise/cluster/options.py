"""On which machines `castwise run` measures."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from castwise.errors import UsageError
from castwise.spec.options import COUNT, OF_MACHINE, Option, RunOptions, options_of

_Option = partial(Option, panel="Many machines")


@dataclass(frozen=True, kw_only=True)
class ManyMachinesOptions:
    """How the trials of `castwise run` are divided among machines."""

    plan_only: Annotated[
        Path | None, _Option("Write the plan, for a GPU unless --device is cpu, and measure nothing.", metavar="FILE")
    ] = None
    plan: Annotated[
        Path | None,
        _Option("Measure the plan in this file, in the place of a workload and its options.", metavar="FILE"),
    ] = None
    shard: Annotated[str | None, _Option("Measure only this part of --plan: 1/8 to 8/8.", metavar="I/N")] = None
    rendezvous: Annotated[
        str | None,
        _Option("Where the nodes of --nodes-per-trial meet: the first one's name.", metavar="HOST:PORT"),
    ] = None
    node_rank: Annotated[
        int | None, _Option("This node's number among them, from 0; 0 keeps the records.", metavar="I")
    ] = None
    on: Annotated[
        str | None,
        _Option(
            "Measure on other machines: slurm, where jobs are submitted; ray, the cluster of this machine or of "
            "RAY_ADDRESS; or ray://HEAD:10001.",
            metavar="ENGINE",
        ),
    ] = None
    nodes: Annotated[int | None, _Option("Nodes that measure at the same time, at the most.", **COUNT)] = None
    per: Annotated[
        Literal["gpu-model", "node"] | None,
        _Option("Measure the whole plan on each (ray): every GPU model, or every node."),
    ] = None
    pack: Annotated[bool, _Option("Allow a trial on each GPU of a node at the same time; records say so.")] = False
    partition: Annotated[str | None, _Option("Slurm's partition.")] = None
    gres: Annotated[
        str | None, _Option("Slurm's gres. Default: as many GPUs as the plan needs, gpu:1.", metavar="GRES")
    ] = None
    sbatch: Annotated[
        tuple[str, ...] | None,
        _Option("Other options of sbatch, comma-separated: time=60, account=mine.", metavar="KEY=VALUE,…"),
    ] = None

    def check(self, options: RunOptions) -> None:
        """Raise a UsageError if options exclude each other."""
        if self.shard is not None and self.plan is None:
            raise UsageError("--shard is a part of a plan. Name its file with --plan.")
        if (self.rendezvous is None) != (self.node_rank is None):
            raise UsageError("--rendezvous and --node-rank go together.")
        self.check_trials(options.device, options.nodes_per_trial or 1)
        self._check_engine()
        if self.plan is not None and self.plan_only is not None:
            raise UsageError("--plan-only writes a plan, and --plan reads one. Give one of the two.")
        for option in options_of(RunOptions) if self.plan is not None else ():
            if option.name not in OF_MACHINE and getattr(options, option.name) != option.field_default:
                raise UsageError(f"The plan '{self.plan}' says what is measured. Leave {option.label} out.")

    def _check_engine(self) -> None:
        if self.on is None:
            if self.nodes or self.per or self.partition or self.gres or self.sbatch:
                raise UsageError(
                    "--nodes, --per, --partition, --gres and --sbatch go with --on slurm or --on ray. Nodes that "
                    "share a trial are --nodes-per-trial."
                )
            return
        if self.on not in ("slurm", "ray") and not self.on.startswith("ray://"):
            raise UsageError(f"--on takes slurm, ray or ray://HEAD:10001; '{self.on}' is none of them.")
        if self.on != "slurm" and (self.partition or self.gres or self.sbatch):
            raise UsageError("--partition, --gres and --sbatch are options of Slurm. Leave them out with --on ray.")
        if self.on == "slurm" and self.per is not None:
            raise UsageError("--per goes with --on ray; for Slurm give one command a kind, each with its --gres.")
        if self.shard is not None or self.plan_only is not None or self.rendezvous is not None:
            raise UsageError(
                "--on measures a whole plan on other machines. Leave --shard, --plan-only and --rendezvous out."
            )

    def check_trials(self, device: str | None, num_nodes: int) -> None:
        """Raise a UsageError if trials on a device of so many nodes cannot be divided so."""
        if self.nodes is not None and self.nodes < num_nodes:
            raise UsageError(f"--nodes {self.nodes} is fewer than the {num_nodes} of --nodes-per-trial.")
        if self.pack and (device == "cpu" or num_nodes > 1):
            raise UsageError("--pack is for trials that leave GPUs of their node free. Leave it out.")
        if self.per == "node" and num_nodes > 1:
            raise UsageError("--per node measures each node alone. Leave it or --nodes-per-trial out.")
