"""Import-only torchvision: SGLang uses it for images alone, and PyPI's builds need CUDA's torch."""

from import_standin import stand_in

__version__ = "0.0.0"
stand_in(globals())
