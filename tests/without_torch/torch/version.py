"""Of a build without CUDA; the version is that of the installed torch."""

from importlib.metadata import version

__version__ = version("torch")
cuda = None
