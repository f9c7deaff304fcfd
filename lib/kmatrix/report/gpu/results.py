"""The numbers of the devices of a run, as results.json has them: plain values with their units."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kmatrix.gpu.balance import Balance
from kmatrix.records.decode import Record, field
from kmatrix.status.stragglers import Ranks

RANK_NAME = "CPU rank "  # prefix of the device name that the recorder gives a rank


class Statistics(Record, frozen=True, kw_only=True):
    """One quantity of one device over a period, in its own unit."""

    mean: Annotated[float, Meta(description="arithmetic mean of the samples")]
    deviation: Annotated[float, Meta(description="population standard deviation")]
    min: Annotated[float, Meta(description="lowest sample")]
    max: Annotated[float, Meta(description="highest sample")]
    count: Annotated[int, Meta(description="samples with a value")]


class DeviceFacts(Record, frozen=True, kw_only=True):
    """One GPU of a recording, or one rank on the CPU."""

    gpu_index: Annotated[int, Meta(description="index of the driver; on the CPU, the rank")]
    gpu_name: Annotated[str, Meta(description="product name")]
    uuid: Annotated[str | None, Meta(description="UUID of the GPU")] = None
    rank: Annotated[int | None, Meta(description="rank of the run that uses the device")] = None
    memory_total: Annotated[float | None, Meta(description="memory of the GPU, MiB; of a rank, of its host")] = None

    @property
    def unit(self) -> str:
        """The word for the device: GPU or rank."""
        return "rank" if self.gpu_name.startswith(RANK_NAME) else "GPU"

    def name_on(self, host: str) -> str:
        """Return its name for a reader: "GPU 2", or "rank 0" on the CPU; with its host "GPU 2 on n1"."""
        return f"{self.unit} {self.gpu_index}{f' on {host}' if host else ''}"


class Device(DeviceFacts, frozen=True, kw_only=True):
    """One device of the last attempt of a run.

    Its quantities are memory_used (MiB; of a rank, its RSS), utilization (time with a kernel, %; of a rank, % of a
    core), power (W), temperature (degrees Celsius) and sm_clock (MHz); one that was never known is missing.
    """

    label: Annotated[str, Meta(description="GPU 2, rank 0; over several nodes with the host: GPU 2 on n1")]
    host: Annotated[str | None, Meta(description="its machine, of a run over several nodes")]
    whole: Annotated[dict[str, Statistics], Meta(description="quantity -> over the whole recording")]
    training: Annotated[dict[str, Statistics] | None, Meta(description="over the training alone; null: unknown")]
    joules: Annotated[float | None, Meta(description="energy, J; null if a part of it is unknown")]
    lost_at: Annotated[float | None, Meta(description="since when it does not respond, Unix s")]
    lost_s: Annotated[float, Meta(description="time without a response, s; its power is unknown")]

    @property
    def main(self) -> dict[str, Statistics]:
        """The statistics of the training, of the whole recording if that is unknown."""
        return self.whole if self.training is None else self.training


class Period(Record, frozen=True, kw_only=True):
    """All devices over a period. null: unknown, also if it is for one device."""

    seconds: Annotated[float | None, Meta(description="sampled time, s")] = None
    memory_used_mean: Annotated[float | None, Meta(description="memory of all devices, mean, MiB")] = None
    mean_power: Annotated[float | None, Meta(description="power of all devices, mean, W")] = None
    utilization: Annotated[float | None, Meta(description="mean over the devices, %")] = None
    joules: Annotated[float | None, Meta(description="energy of all devices in the sampled time, J")] = None
    joules_per_token: Annotated[float | None, Meta(description="J/token; null: less than 90 % was sampled")] = None
    balance: Annotated[dict[str, Balance], Meta(description="of each quantity")] = field(default_factory=dict)


class Gpu(Record, frozen=True, kw_only=True):
    """The devices of a run."""

    evidence: Annotated[str | None, Meta(description="file of the recording; null: nothing was recorded")] = None
    unit: Annotated[str, Meta(description="word for a device: GPU or rank")] = "GPU"
    simulated: Annotated[bool, Meta(description="the GPUs were simulated: nothing was measured")] = False
    samples: Annotated[int, Meta(description="samples of all recordings")] = 0
    energy_source: Annotated[str | None, Meta(description="counter, or power (integrated)")] = None
    gpus: Annotated[tuple[Device, ...], Meta(description="each device of the last attempt")] = ()
    whole: Annotated[Period, Meta(description="the whole recording, with all attempts in time and energy")] = Period()
    training: Annotated[
        Period | None,
        Meta(description="without set-up, evaluations, checkpoints, ending, time between attempts; null: unknown"),
    ] = None
    memory_used_max: Annotated[float | None, Meta(description="highest sum over the devices of an attempt, MiB")] = None
    memory_total: Annotated[float | None, Meta(description="memory of all GPUs, or of all hosts, MiB")] = None
    phases: Annotated[dict[str, float], Meta(description="phase without training -> s")] = field(default_factory=dict)
    ranks: Annotated[Ranks | None, Meta(description="compute time of each rank; null: unknown")] = None
    notes: Annotated[
        tuple[str, ...], Meta(description="what impaired devices, and limits of these numbers, one sentence each")
    ] = ()

    @property
    def main(self) -> Period:
        """The training, the whole recording if that is unknown."""
        return self.training or self.whole
