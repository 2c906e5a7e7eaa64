"""Import-only torchvision. SGLang uses it only for images; its wheels need torch with CUDA."""

from import_standin import stand_in

__version__ = "0.0.0"
stand_in(globals())
