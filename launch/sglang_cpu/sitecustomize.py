"""Runs at every start of Python in the SGLang test environment: declares two operators that torchvision asks for.

torchvision's wheel is built for CUDA and does not load its library beside a CPU build of torch; importing it then fails
at operators whose schemas are unknown. The schemas alone are enough, as no model of the tests detects objects.
"""

import importlib.abc
import importlib.util
import sys


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the schemas when torchvision is first asked for, so that other starts do not import torch."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        self.library = torch.library.Library("torchvision", "DEF")
        self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.util.find_spec(fullname)


_FINDER = _BeforeTorchvision()
sys.meta_path.insert(0, _FINDER)
