"""castwise's command line on the fake engine, as a process of its own: `python fake_cli.py run resnet50 ...`.

CASTWISE_FAKE_FAULTS     what goes wrong, as `fake_engine.parse_faults` reads it
CASTWISE_FAKE_MISSING    packages that are not installed either, comma-separated
CASTWISE_FAKE_READY_FD   a descriptor that a byte is written to when a trial starts to hang
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

MEASURE_ONLY = ("torch", "torchvision", "timm", "pynvml")
MISSING = os.environ.get("CASTWISE_FAKE_MISSING", "").split(",")
UNCLEAN = 99


class _NoTorch(MetaPathFinder):
    """Refuses what only the measuring processes may import."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in MEASURE_ONLY:
            raise ImportError(f"{fullname} was imported outside trial/")
        if fullname.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named '{fullname}'", name=fullname)
        return None


def main() -> None:
    sys.dont_write_bytecode = True  # cut off by a test's limit of a file's size, it would fail all later imports
    sys.meta_path.insert(0, _NoTorch())
    from fake_engine import FakeEngine, announce_on, parse_faults

    from castwise.cli import measuring
    from castwise.cli.app import main as castwise_main
    from castwise.max_batch import search
    from castwise.orchestrator import machine

    descriptor = os.environ.get("CASTWISE_FAKE_READY_FD")
    faults = parse_faults(os.environ.get("CASTWISE_FAKE_FAULTS", ""))
    engine = FakeEngine(faults=faults, exclusive=False)
    if "--on" in sys.argv:
        from castwise.cluster import shard, slurm

        shard.PROGRAM, slurm._LATE_SECONDS, slurm._LOOK_SECONDS = (__file__,), 0.3, 0.1
    if descriptor is not None:
        engine.on_hang = announce_on(int(descriptor))
    machine.ForkserverEngine = lambda data_dir, commit: engine  # type: ignore[misc, assignment]
    search.may_have_gpu = lambda device: device != "cpu"
    measuring.MOMENT_SECONDS = 3600.0
    try:
        castwise_main()
    finally:
        loaded = [name for name in MEASURE_ONLY if name in sys.modules]
        if loaded or engine.num_open:
            print(f"fake_cli: imported {loaded}, {engine.num_open} sessions left open", file=sys.stderr)
            sys.stderr.flush()
            os._exit(UNCLEAN)


if __name__ == "__main__":
    main()
