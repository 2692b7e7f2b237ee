"""Measure again what the documents quote: the commands behind the records.

    python benchmarks/measure_again.py DIR [--gpus N] [--seconds S] [--list] JOB ...

A JOB is a kind of records and a name, such as `trials/resnet50`, or a kind; `--list` prints all. What it writes under
DIR belongs under benchmarks/records/. Jobs run on N GPUs side by side (of those that CUDA_VISIBLE_DEVICES names), each
on one GPU and its share of the cores, in the order in which they are named. Jobs of the kinds seed004 and
scaling_compiled take all GPUs: run them by themselves, with one lane (`--gpus 1`). After an interruption the same
command goes on.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import seed004
import torch
from by_hand import ROWS
from script_agreement import SIZES
from search_tables import searches
from stored import visible_gpus

from castwise.analysis.steady_metrics import unit_of
from castwise.records.schema import Trial
from castwise.registry.precisions import NARROW_PRECISIONS

HERE = Path(__file__).parent
WORKLOADS = ("resnet50", "wrn-28-10", "lstm-lm", "lstm-lm-1500", "mlp-4096", "mnist-cnn", "dpn92")
TRANSFORMERS = ("gpt2", "gpt2-xl", "gpt-d4096", "llama-1b", "bert-base", "vit-b16")
WIDTHS = ("gpt-d768x12", "gpt-d1024x12", "gpt-d1536x8", "gpt-d2048x8", "gpt-d4096", "gpt-d8192x2")
LENGTHS = ("llama-1b@512", "llama-1b@8192")  # beside 2,048 tokens, its own length
FP8 = tuple(row.name for row in NARROW_PRECISIONS if row.format in ("fp8", "fp8-rowwise"))
TUNED = ("gpt2", "gpt2-b64", "gpt-d2048x12", "gpt-d4096", "gpt-d4096-fp8", "vit-b16")  # rows of by_hand
# What is measured under another name than the workload's.
NAMES = {"own-gpt2": str(HERE / "gpt2.py")} | {name: row.workload for name, row in ROWS.items()}
NAMES |= {name: f"{HERE / 'adam_gpu.py'}:{name}" for name in ("transformer", "lstm", "resnet9")}
_WIDE = "fused-optimizer+pad-vocabulary+compile"
_UNPADDED = "fused-optimizer+compile"  # the vocabulary needs no padding, or there is none
_SMALLER = "none,activation-checkpointing,selective-checkpointing,chunked-loss"  # loops that differ in memory
_AVERAGED = ("", "+ddp-bucket-view+ddp-buckets-100+ddp-static-graph", "+coalesced-reduce")
_KEPT_IN = "--optimizer-state"
# By kind of records: the names, the command, and its options.
KINDS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "trials": ((*WORKLOADS, "gpt2", "own-gpt2"), "run", ()),
    "transformers": (TRANSFORMERS, "run", ()),
    "searches": ((*WORKLOADS, *TRANSFORMERS, "efficientnet_b0", "fastai-resnet50", "own-gpt2"), "tune", ()),
    "fp8": (
        (*dict.fromkeys((*TRANSFORMERS, *WIDTHS)), *LENGTHS),
        "run",
        ("--precision", f"bf16-mixed,{','.join(FP8)}", "--rounds", "3", "--techniques", _WIDE),
    ),
    "fit": (TRANSFORMERS, "max-batch", ("--precision", "bf16-mixed", "--no-curve", "--techniques", _SMALLER)),
    "tuned": (TUNED, "why", ()),
    "variants": (TUNED, "run", ("--rounds", "1")),  # of these loops, that might be faster
    # How long the first step takes, all layers compiled or one for all alike.
    "compile": (
        ("gpt2-xl", "llama-1b"),
        "run",
        ("--precision", "bf16-mixed", "--rounds", "1", "--techniques", "none,compile,compile-blocks"),
    ),
    "by_hand": (tuple(ROWS), "", ()),
    "scripts": (tuple(name for name in SIZES if name != "ddp"), "", ()),  # which needs two GPUs
    "emitted": (tuple(searches()), "", ("--rounds", "5")),
    "seed004": (tuple(seed004.BATCHES), "run", ()),
    # What averages gradients over GPUs with the least loss.
    "scaling_compiled": (("gpt2", "resnet50"), "run", ("--precision", "bf16-mixed,bf16-master", "--techniques")),
    # Of what weights and Adam's state are kept in: memory, and whether networks train as well.
    "little_memory": (
        ("gpt2", "gpt2-xl", "llama-1b", "vit-b16"),
        "max-batch",
        (
            _KEPT_IN,
            "fp32,8-bit",
            "--precision",
            "bf16-mixed,bf16-sr,fp32",
            "--techniques",
            "none,activation-checkpointing",
        ),
    ),
    "accuracy_state": (
        ("transformer", "lstm", "resnet9"),
        "accuracy",
        (_KEPT_IN, "fp32,bf16,8-bit,4-bit", "--precision", "fp32,bf16-sr"),
    ),
}
# Each process of a comparison with an emitted script chooses its kernels anew.
_VARIABLES = {"emitted": {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}}
# Sessions of the two largest models take half a minute each.
_OPTIONS = {
    "searches/resnet50": ("--memory", "8GiB"),
    # A first step takes a minute, and a search has nine: the precisions that lost before are left out.
    "searches/gpt2-xl": ("--budget", "15min"),
    **dict.fromkeys(("searches/gpt-d4096", "searches/llama-1b"), ("--precision", "default,bf16-master,fp8-tensorwise")),
    "transformers/llama-1b": ("--rounds", "2"),
    "transformers/gpt2-xl": ("--rounds", "2"),
    "fp8/gpt2-xl": ("--rounds", "2", "--techniques", f"{_WIDE}-blocks"),
    "fp8/llama-1b": ("--rounds", "2", "--techniques", _UNPADDED),
    **dict.fromkeys(
        (f"fp8/{name}" for name in LENGTHS),
        ("--rounds", "2", "--techniques", _UNPADDED, "--precision", "bf16-mixed,fp8-tensorwise"),
    ),
    "fp8/vit-b16": ("--techniques", _UNPADDED),
    **{f"little_memory/{name}": ("--no-curve",) for name in KINDS["little_memory"][0]},
    "scaling_compiled/gpt2": (",".join(f"{_WIDE}{each}" for each in _AVERAGED),),
    "scaling_compiled/resnet50": (",".join(f"channels-last+{_UNPADDED}{each}" for each in _AVERAGED),),
    "accuracy_state/transformer": ("--epochs", "3"),
    "accuracy_state/lstm": ("--epochs", "2"),
    "accuracy_state/resnet9": ("--epochs", "5"),
}
for _name in TUNED:
    _row, _loop = ROWS[_name], ROWS[_name].ungraphed
    _of_row = ("--batch-size", f"{_row.batch_size}", "--precision", _row.precision, "--techniques")
    _more = [] if "-attention" in _loop else ["cudnn-attention", "flash-attention"]
    _more += ["chunked-loss"] if _row.padded and "chunked-loss" not in _loop else []
    _autotuned = _loop.replace("+compile", "+compile-max-autotune")
    _OPTIONS[f"tuned/{_name}"] = (*_of_row, _loop)
    _OPTIONS[f"variants/{_name}"] = (*_of_row, ",".join((_loop, *(f"{_loop}+{each}" for each in _more), _autotuned)))
_ON_ALL = ("seed004/", "scaling_compiled/")
_LEAST_SECONDS = 20.0  # that a job is worth beginning for


def main() -> int:
    """Run the jobs, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="DIR")
    parser.add_argument("jobs", nargs="*", metavar="JOB")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=86400.0, help="after which all jobs are interrupted")
    parser.add_argument("--list", action="store_true", help="print all jobs")
    arguments = parser.parse_intermixed_args()
    of_kind = {kind: [f"{kind}/{name}" for name in names] for kind, (names, _, _) in KINDS.items()}
    every = [job for jobs in of_kind.values() for job in jobs]
    usual = [job for job in every if not job.startswith(_ON_ALL)]
    arguments.jobs = [job for named in arguments.jobs for job in of_kind.get(named, [named])]
    if unknown := set(arguments.jobs) - set(every):
        parser.error(f"no such job: {', '.join(sorted(unknown))}")
    on_all = [job for job in arguments.jobs if job.startswith(_ON_ALL)]
    if on_all and (arguments.gpus > 1 or len(on_all) < len(arguments.jobs)):
        parser.error("jobs of seed004 and scaling_compiled take all GPUs: name them alone, with --gpus 1")
    for job in on_all:
        kind, _, name = job.partition("/")
        if kind == "seed004":
            _OPTIONS[job] = seed004.options(name, torch.cuda.device_count())
        else:
            _OPTIONS[job] += ("--gpus", f"1,{max(2, torch.cuda.device_count())}")
    if arguments.list:
        print(*(arguments.jobs or every), sep="\n")
        return 0
    waiting: SimpleQueue[str] = SimpleQueue()
    for job in arguments.jobs or usual:
        waiting.put(job)
    unfinished: list[str] = []
    end = time.monotonic() + arguments.seconds
    lanes = [Lane(gpu, arguments.gpus, arguments.out, end, has_all=bool(on_all)) for gpu in range(arguments.gpus)]
    threads = [Thread(target=lane.work, args=(waiting, unfinished)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1 if unfinished else 0


class Lane:
    """A GPU, its share of the cores, and a cache of compiled code of its own."""

    def __init__(self, gpu: int, num_gpus: int, out: Path, end: float, *, has_all: bool) -> None:
        """Take a GPU of some, or all, until a time of the monotonic clock."""
        self._out, self._end = out, end
        cores = sorted(os.sched_getaffinity(0), key=_core_of_thread)
        share = len(cores) // num_gpus
        self._cores = cores[gpu * share : (gpu + 1) * share]
        one = {} if has_all else {"CUDA_VISIBLE_DEVICES": visible_gpus(num_gpus)[gpu]}
        self._variables = os.environ | one

    def work(self, waiting: "SimpleQueue[str]", unfinished: list[str]) -> None:
        """Run jobs until none is left, or no time."""
        while True:
            try:
                job = waiting.get_nowait()
            except Empty:
                return
            started = time.monotonic()
            has_time = self._end - started > _LEAST_SECONDS
            is_done = has_time and self._run(job)
            unfinished += [] if is_done else [job]
            outcome = "done" if is_done else "not done" if has_time else "no time for it"
            print(f"{job}: {outcome}, {time.monotonic() - started:.0f} s", flush=True)

    def _run(self, job: str) -> bool:
        """Run one job, with nothing compiled yet; return whether it ended in time with a result."""
        kind, _, name = job.partition("/")
        _, verb, options = KINDS[kind]
        record = self._out / kind / f"{name}.json"
        if not verb:
            if record.exists():
                return True
            file = "script_agreement.py" if kind == "scripts" else f"{kind}.py"
            command = [sys.executable, str(HERE / file), "--out", str(record), name, *options]
        else:
            results = self._out / {"searches": f"results/{name}", "fit": f"fit/{name}"}.get(kind, kind)
            command = [sys.executable, "-m", "castwise", verb, NAMES.get(name, name), "--results", str(results)]
            command += ["--format", "json", *options, *_OPTIONS.get(job, ())]
        cache = self._out / "compiled" / job.replace("/", "-")
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
        process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, self._cores)), *command],
            env=self._variables | caches | _VARIABLES.get(kind, {}),
            stdout=subprocess.PIPE if verb else None,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=max(0.0, self._end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            process.communicate()
            return False
        if verb == "tune" and printed:
            (self._out / kind).mkdir(parents=True, exist_ok=True)
            account = account_of(json.loads(printed))
            (self._out / kind / f"{name}.json").write_text(json.dumps(account, separators=(",", ":")) + "\n")
        return bool(printed) if verb else process.returncode == 0


def _core_of_thread(thread: int) -> tuple[int, int]:
    """Return a key by which the threads of one core are neighbours."""
    siblings = Path(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list")
    first = re.match(r"\d+", siblings.read_text()) if siblings.exists() else None
    return (int(first[0]) if first else thread), thread


def account_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return what a search printed without its raw trials."""
    trials = document.pop("trials")
    first = min(trials, key=lambda trial: trial["started_at"])
    document |= {key: document["start"][key] for key in ("batch_size", "precision")}
    document |= {key: first[key] for key in ("started_at", "environment")}
    return document | {"unit": unit_of(Trial.model_validate(first)), "num_trials": len(trials)}


if __name__ == "__main__":
    sys.exit(main())
