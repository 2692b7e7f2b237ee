"""What `castwise run` does with a plan: write it, or measure a part of it here."""

import shlex
from pathlib import Path

from castwise.cli.measuring import looking, measuring
from castwise.cli.options import PrintOptions
from castwise.cli.output import say
from castwise.orchestrator.job import make_plan
from castwise.render.units import pluralize
from castwise.report.files import atomic_write
from castwise.spec.options import RunOptions


def write_plan(options: RunOptions, path: Path, output: PrintOptions) -> int:
    """Write the plan of a request."""
    with measuring(options, output), looking():
        plan = make_plan(options)
    atomic_write(path, plan.model_dump_json(indent=1).encode() + b"\n")
    comparisons = len(plan.comparisons)
    count = f"{pluralize(len(plan.specs), 'configuration')} in {pluralize(comparisons, 'comparison')}"
    say(f"{path}: {count} on {plan.device}. Next: castwise run --plan {shlex.quote(str(path))} --shard 1/{comparisons}")
    return 0
