"""GPU recordings: the values in them, how they are encoded, and how every known layout is read back."""

from kmatrix.gpu.formats.live import JsonArrayFile as JsonArrayFile
from kmatrix.gpu.formats.reading import Loss as Loss
from kmatrix.gpu.formats.reading import StatsReader as StatsReader
from kmatrix.gpu.formats.reading import read_stats as read_stats
from kmatrix.gpu.formats.samples import COLUMNS as COLUMNS
from kmatrix.gpu.formats.samples import Recording as Recording
from kmatrix.gpu.formats.samples import SampleFile as SampleFile
from kmatrix.gpu.formats.samples import read_samples as read_samples
from kmatrix.gpu.formats.values import SIMULATED as SIMULATED
from kmatrix.gpu.formats.values import GpuSample as GpuSample
from kmatrix.gpu.formats.values import Snapshot as Snapshot
from kmatrix.gpu.formats.values import aggregate as aggregate
from kmatrix.gpu.formats.values import csv_header as csv_header
from kmatrix.gpu.formats.values import csv_row as csv_row
from kmatrix.gpu.formats.values import finite as finite
from kmatrix.gpu.formats.values import legacy as legacy
from kmatrix.gpu.formats.values import multi as multi
