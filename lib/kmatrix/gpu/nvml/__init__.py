"""The door to NVIDIA's driver (NVML): which GPUs there are, which may be used, and what they do."""

from kmatrix.gpu.nvml.detect import Detected as Detected
from kmatrix.gpu.nvml.detect import Gpu as Gpu
from kmatrix.gpu.nvml.detect import detect as detect
from kmatrix.gpu.nvml.detect import usable as usable
from kmatrix.gpu.nvml.guests import occupied as occupied
from kmatrix.gpu.nvml.links import UNKNOWN as UNKNOWN
from kmatrix.gpu.nvml.links import distances as distances
from kmatrix.gpu.nvml.source import NvmlSource as NvmlSource
from kmatrix.gpu.nvml.source import open_source as open_source
