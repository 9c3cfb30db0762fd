"""One simulated process that computes cases for many tests: starting torch_npu takes seconds, a case milliseconds.

python tests/simnpu/worker.py cases

A line of JSON in, {"function": a name in that module, "arguments": {...}}, a line of JSON out: {"result": ...} or
{"error": the traceback}. What a case prints goes to stderr.
"""

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a case's own output must not stand among the answers
    sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
    module = importlib.import_module(f"simnpu.{sys.argv[1]}")

    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(module, request["function"])(**request["arguments"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
