"""A rank of a script that a launcher started: what runs there, as a module, in a fresh interpreter."""

import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from castwise.records.messages import Call, Failed
from castwise.registry.precisions import AS_WRITTEN
from castwise.spec.trial import TrialSpec
from castwise.spec.user_model import UserModel
from castwise.trial import server
from castwise.trial.classify_error import classify
from castwise.trial.kernel_profile import communication_of, rank_step
from castwise.trial.script.ranks import CALL, DOOR, FAILURE, PROFILED, SECONDS, UNLIMITED, WARM, SharedFolder
from castwise.trial.script.run import ScriptRun, ScriptTrial
from castwise.trial.script.trackers import switch_off
from castwise.trial.user_model.source import where, with_line

# Rank 0 is profiled in parts, each of steps that lead in and some that count: one loads CUPTI, one records the device,
# and one nothing. In that one another rank records its device, as all before and after it slows rank 0.
_RECORDED_MARKS = (4, 6)  # that are passed when it begins and ends


def main() -> None:
    os.environ["TMPDIR"], name, device = sys.argv[1:]
    tempfile.tempdir = None  # it is read anew
    folder = Path(name)
    ranks = SharedFolder(folder)
    if device != "cpu":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    switch_off(folder)
    if ranks.rank == "0":
        door = socket.socket(socket.AF_UNIX)
        door.connect(str(folder / DOOR))
        server.serve(Connection(door.detach()), device, ranks)
        return
    arguments = Call.model_validate_json((folder / CALL).read_bytes()).arguments
    if "spec" in arguments:
        spec = TrialSpec.model_validate(arguments["spec"])
        script = ScriptTrial(spec.model_copy(update={"device": device})).run
    else:
        script = ScriptRun(UserModel.model_validate(arguments["model"]), AS_WRITTEN, device)

    recorder, passed = profile(activities=[ProfilerActivity.CUDA]), list[int]()  # steps up to each mark
    waited = list[float]()  # for batches: when the recorder started and stopped

    def next_mark(moments: Sequence[object]) -> int:
        if len(passed) == _RECORDED_MARKS[1]:
            recorder.stop()
            count = sum(passed[_RECORDED_MARKS[0] :])
            seconds, own = rank_step(communication_of(recorder, count), torch.device(device))
            waited.append(0.0 if script.hooks is None else script.hooks.data_seconds)
            own = own.model_copy(update={"data_seconds": (waited[-1] - waited[0]) / count})
            ranks.tell(f"{SECONDS}{ranks.rank}", f"{seconds} {own.model_dump_json()}")
        if len(moments) == 2:
            ranks.tell(f"samples-{ranks.rank}", str(script.samples_per_step))
        if script.hooks is not None and (folder / WARM).exists():
            script.hooks.stop_looking()
        num_steps = min(ranks.wait_for_more(script.num_steps), 1 if len(moments) < 2 else UNLIMITED)
        if device != "cpu" and (folder / PROFILED).exists():
            if len(passed) == _RECORDED_MARKS[0]:
                recorder.start()
                waited.append(0.0 if script.hooks is None else script.hooks.data_seconds)
            passed.append(num_steps)
        return num_steps

    script.folder = ranks.make_folder()
    script.follow(next_mark)
    script.run()
    if isinstance(script.ending, Exception):
        status, text = classify(script.ending)
        text = with_line(text, where(script.ending))
        failed = Failed(status=status, message=text if status == "unsupported" else f"rank {ranks.rank}: {text}")
        ranks.tell(FAILURE, failed.model_dump_json())
        raise script.ending


if __name__ == "__main__":
    main()
