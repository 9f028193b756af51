"""A stand-in for SGLang's CUDA kernels on a machine without CUDA: every name can be imported, none can be called.

A dense model on the torch-native attention backend calls none of them; what does call one fails with the kernel's name.
"""

import importlib.abc
import importlib.machinery
import sys

__version__ = "999.0.0"


class _Absent:
    """A kernel that is not here."""

    def __init__(self, name):
        self.__name__ = self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name} needs SGLang's CUDA kernels, this is the stand-in for CPU tests")


def _absent_in(module):
    def lookup(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{module}.{name}")

    return lookup


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every submodule exists and is as empty as this one."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module):
        module.__getattr__ = _absent_in(module.__name__)


sys.meta_path.append(_Submodules())
__getattr__ = _absent_in(__name__)
