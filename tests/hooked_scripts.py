"""Run training scripts alone and hooked, each in a fork of this process, and print all their losses as JSON.

Its argument is a JSON list of [file, precision or "alone", value of --amp]; the answer has a list of losses for each.
With "inspect" in the place of a precision the answer is what castwise finds out about the script, or its error; with
"measure" it is what it measures, in the precision that stands last, with "measure-N" after a lead-in of N seconds; with
"profile" the classes of what takes the most time; with "count" the samples of a step; with "flops" its FLOPs, with
"numerics" what rounding does, with "own" what it does itself, all as JSON; with "timed-N", given N steps or no number,
the steps of each block, the work between steps that was not timed whole, the share of padding, and in how many steps
torch.compile compiled. With a second argument the answers are the lines of the logs, and why a script failed, or
castwise refused it. The value of --amp may be followed by other arguments.
"""

import gc
import importlib
import json
import os
import runpy
import shlex
import socket
import sys
import tempfile
import threading
import traceback
from multiprocessing import util
from pathlib import Path

import torch
import torch._dynamo  # a first backward imports it: once is enough for all
from fake_engine import fake_spec
from programs import PATIENCE_SECONDS

from castwise.errors import UsageError
from castwise.spec.trial import MeasurementProtocol
from castwise.spec.user_model import UserModel
from castwise.trial.classify_error import classify
from castwise.trial.script import run
from castwise.trial.script.run import Order, ScriptRun, ScriptTrial
from castwise.trial.user_model.source import where, with_line

NUM_STEPS = 8
ASKED = ("inspect", "measure", "count", "profile", "flops", "numerics", "own", "timed")
HANG_SECONDS = 5.0  # what a script that hangs has for its steps
NUM_RANKS = {"ddp": 2, "fsdp": 2, "fsdp2": 2}
# What scripts import that takes seconds: once is enough for all.
SLOW_IMPORTS = {
    "timm_train": ("timm",),
    "transformers_trainer": ("transformers.trainer", "transformers.models.bert.modeling_bert"),
    "lightning_module": ("lightning.pytorch",),
    "accelerate_loop": ("accelerate",),
}


def run_alone(file: str, arguments: list[str]) -> None:
    sys.argv = [file, *arguments]
    sys.path.insert(0, str(Path(file).parent))
    runpy.run_path(file, run_name="__main__")


def run_hooked(file: str, arguments: list[str], precision: str) -> None:
    device = "cuda:0" if "--device=cuda" in arguments else "cpu"
    script = ScriptRun(UserModel(kind="script", path=file, name="", arguments=tuple(arguments)), precision, device)

    def order() -> None:
        for num_steps in (1, NUM_STEPS - 1):
            script.carry_out(Order(lambda moments, number=num_steps: 1 if len(moments) < number else None))
            if num_steps == 1 and script.hooks is not None and script.hooks.stepped:
                script.hooks.precision.make_masters(script.hooks.models, script.hooks.stepped[0])
        script.stop()

    threading.Thread(target=order, daemon=True).start()
    script.run()
    if isinstance(script.ending, Exception):
        raise script.ending


def run_asked(file: str, how: str, precision: str, answer: Path) -> None:
    """Run a script as a trial's process does, and write what becomes known of it: its batch, its steps, or itself."""
    amp, precision = (precision, "as-written") if how == "own" else ("", precision)
    arguments = ("--log", os.devnull, "--amp", amp, "--steps", "99") if amp else ()
    model = UserModel(kind="script", path=file, name="", arguments=arguments)
    limit = 4 * HANG_SECONDS if Path(file).stem == "waits" else PATIENCE_SECONDS
    num_steps = 7 if Path(file).stem == "functional" else 8  # in two blocks
    num_steps = None if Path(file).stem.startswith("ends-") else num_steps
    how, _, number = how.partition("-")
    profile_steps = 2 * (how in ("profile", "flops", "numerics"))
    protocol = MeasurementProtocol(
        warm_up_steps=700 if how == "timed" and not number else 1,  # in which each script has its work once
        warm_up_seconds=0.5 if how == "timed" or number else 10.0,
        num_steps=(int(number) if number else None) if how == "timed" else num_steps,
        timeout_seconds=limit,
        profile_steps=profile_steps,
        numerics=how == "numerics",
    )
    trial = ScriptTrial(fake_spec(precision or "as-written", device="cpu", user_model=model, protocol=protocol))
    script = ScriptRun(model, "as-written", "cpu") if how == "inspect" else trial.run

    def ask() -> None:
        try:
            if how == "inspect":
                notes = list[str]()
                try:
                    known = script.inspect(limit, notes.append)
                    found = f"batch {known.batch_size}, same: {' '.join(known.same_precisions)}"
                except UsageError as error:
                    raise UsageError(" / ".join([*notes, str(error)])) from None
            else:
                trial.set_up()
                facts = trial.warm_up()
                if Path(file).stem == "hangs":
                    run._LIMIT_SHARE = HANG_SECONDS / PATIENCE_SECONDS
                blocks = trial.run_stretch(float(number or 0) if how == "measure" else 0.0, 2, 0.1)
                num_steps = sum(each.num_steps for each in blocks)
                samples = trial.finish()
                notes, between = "; ".join(samples.notes), samples.between_steps
                found = f"{num_steps} steps, {sum(each.skipped_steps for each in blocks)} skipped; {notes}"
                if how == "own":
                    lost = facts.lost_updates
                    found = json.dumps([facts.own_precision, facts.framework, lost and lost.model_dump()])
                if how == "count":
                    found = f"{sum(each.num_samples or 0 for each in blocks) / num_steps:g} a step; {notes}"
                if how == "timed":
                    lengths = [each.num_steps for each in blocks]
                    others = [facts.padding_share, samples.compiled_steps]
                    found = json.dumps([lengths, between and between.model_dump(), *others])
                if how == "profile":
                    seconds = trial.profile(2, None).class_seconds
                    found = max(seconds, key=seconds.__getitem__)
                if how == "flops":
                    flops = trial.profile(2, None).flops
                    found = "" if flops is None else flops.model_dump_json()
                if how == "numerics":
                    numerics = trial.profile(2, None).numerics
                    found = "" if numerics is None else numerics.model_dump_json()
        except Exception as error:  # noqa: BLE001  whatever it is, a test reads it
            found = with_line(": ".join(classify(error)), where(error))
        answer.write_text(found)
        script.end()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    script.run()
    thread.join()


def losses_of(file: str, how: str, amp: str, *, in_words: bool = False) -> list[list[float]] | list[str] | str:
    with tempfile.NamedTemporaryFile() as log:
        arguments = ["--log", log.name, "--amp", *shlex.split(amp)]
        children, num_ranks = [], NUM_RANKS.get(Path(file).stem, 1)
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        for rank in range(num_ranks):
            children.append(os.fork())
            if children[-1]:
                continue
            if num_ranks > 1:  # as torchrun sets it
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks))
                os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
            try:
                if how.partition("-")[0] in ASKED:
                    run_asked(file, how, amp, Path(log.name))
                elif how == "alone":
                    run_alone(file, arguments)
                else:
                    run_hooked(file, arguments, how)
            except BaseException as error:  # noqa: BLE001  it ends here
                if not in_words:
                    traceback.print_exc()
                    os._exit(1)
                with Path(log.name).open("a") as lines:
                    print(error, file=lines)
            os._exit(0)
        assert all(os.waitpid(child, 0)[1] == 0 for child in children), (file, how, amp)
        if how.partition("-")[0] in ASKED:
            return Path(log.name).read_text()
        if in_words:
            return Path(log.name).read_text().splitlines()
        return [list(map(float, line.split())) for line in Path(log.name).read_text().splitlines()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    util.get_temp_dir()  # which is removed at the end
    jobs = json.loads(sys.argv[1])
    for script in {Path(file).stem for file, _, _ in jobs} & set(SLOW_IMPORTS):
        for module in SLOW_IMPORTS[script]:
            importlib.import_module(module)
    gc.freeze()  # no child looks through all these modules
    print(json.dumps([losses_of(*job, in_words=len(sys.argv) > 2) for job in jobs]))
