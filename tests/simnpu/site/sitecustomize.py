"""Python runs this at the start of every simulated process: it registers the CPU-backed kernels as soon as the
program (or torch by itself) has imported torch_npu, whichever way it does so. A sitecustomize that this one hides runs
as well."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


class _AfterTorchNpu(importlib.abc.MetaPathFinder):
    """Finds torch_npu as everybody does, with one thing to do after it has been executed."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch_npu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module):
            execute(module)
            sys.path.insert(0, str(HERE.parent.parent))
            try:
                importlib.import_module("simnpu.kernels").register()
            finally:
                sys.path.remove(str(HERE.parent.parent))

        spec.loader.exec_module = execute_and_register
        return spec


def _run_hidden() -> None:
    elsewhere = [folder for folder in sys.path if Path(folder).resolve() != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if not os.environ.get("SIMNPU_ADAPTERS"):  # where the wheel's own adapters run, nothing is replaced
    sys.meta_path.insert(0, _AfterTorchNpu())
_run_hidden()
