"""Of a build without CUDA; the version is that of the installed torch."""

from rallypoint.launcher.torch_version import torch_version

__version__ = torch_version()
cuda = None
