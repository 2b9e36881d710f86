"""How busy the machine is: GPUs through NVML where it is there, else the CPU's cores. Shares, 0 to 1."""

from collections.abc import Callable


def utilization_meter(device: str) -> Callable[[], float]:
    """A function that returns the share of use since it was last called (GPU: over NVML's own last second)."""
    return _gpus() if device == "cuda" else _cores()


def _cores() -> Callable[[], float]:
    import psutil

    psutil.cpu_percent(None)
    return lambda: psutil.cpu_percent(None) / 100


def _gpus() -> Callable[[], float]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no NVML: the number is left out of the metrics, nothing else depends on it
        return lambda: float("nan")
    return lambda: sum(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles) / len(handles) / 100
