"""Record what a command prints on a terminal of 80 columns, and draw it: docs/images/own-script.svg.

    python benchmarks/own_script/picture.py record FILE COMMAND ...
    python benchmarks/own_script/picture.py draw    # the newest under benchmarks/records/own_script/

In README: `castwise run -- python trainer.py`, with a copy of the trainer.py beside this file, and the checkpoint that
it makes, in a folder of their own.
Standard output is a terminal, standard error is not: castwise reports its progress there, and no line is written over.
"""

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

WIDTH = 80
ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "images" / "own-script.svg"


def record(file: Path, command: list[str]) -> int:
    """Write the command and what it prints, with its colours; return its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 1000, WIDTH, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, env=environment)
    os.close(theirs)
    printed = b""
    try:
        while part := os.read(ours, 65536):
            printed += part
    except OSError:  # Linux says so that the other side is closed
        pass
    file.write_bytes(f"\x1b[1m$ {shlex.join(command)}\x1b[0m\n".encode() + printed.replace(b"\r\n", b"\n"))
    return process.wait()


def draw() -> str:
    """Return the newest recording as SVG that loads nothing: no font either."""
    from rich.console import Console  # recording needs none
    from rich.text import Text

    text = max((ROOT / "benchmarks" / "records" / "own_script").glob("*.ansi")).read_text()
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    lines = Text.from_ansi(text.strip()).split(allow_blank=True)
    for line in lines:
        console.print(*line.divide(range(WIDTH, len(line), WIDTH)), sep="\n")  # where a terminal breaks them
    picture = console.export_svg(title="castwise", unique_id="own-script")
    return re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)


def main() -> int:
    """Record or draw."""
    what, *words = sys.argv[1:]
    if what == "record":
        return record(Path(words[0]), words[1:])
    TARGET.write_text(draw())
    return 0


if __name__ == "__main__":
    sys.exit(main())
