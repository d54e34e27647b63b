"""Whether all that programs can import has types, as pyright --verifytypes sees it: every name without one is printed.

python .ci/type_completeness.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    here = Path(sys.executable).parent
    # pyright takes third-party libraries from the interpreter that PATH shows first.
    environment = {**os.environ, "PATH": f"{here}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [here / "pyright", "--verifytypes", "nsq_fast", "--ignoreexternal", "--outputjson"]
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(command, cwd=elsewhere, env=environment, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)["typeCompleteness"]
    wrong = [
        f"{symbol['name']}: {message['message']}"
        for symbol in found["symbols"]
        if symbol["isExported"]
        if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]
        for message in symbol["diagnostics"]
        if message["severity"] == "error"
    ]
    sys.stdout.write("".join(f"{each}\n" for each in wrong))
    sys.stdout.write(f"{100 * found['completenessScore']:.1f} % of the public names have a type\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
