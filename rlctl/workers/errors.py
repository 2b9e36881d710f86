"""Errors that name the worker at fault: its method raised, its process died, or it did not answer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """One worker's exception as plain text. traceback: the one in the worker's process."""

    worker: str
    type: str
    text: str
    traceback: str


class WorkerError(RuntimeError):
    """Methods of workers raised. The workers are alive and can be called again."""

    def __init__(self, call: str, failures: list[Failure]) -> None:
        self.call = call
        self.failures = failures
        first_failure = failures[0]
        rest = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        super().__init__(f"{call} on {first_failure.worker}: {first_failure.type}: {first_failure.text}{rest}")

    def tracebacks(self) -> str:
        """Return the tracebacks from the workers' processes, each below its worker's name."""
        return "\n".join(f"--- {failure.worker}\n{failure.traceback}" for failure in self.failures)


class WorkerDied(RuntimeError):
    """The processes of one or more workers are gone. The call's other answers are lost too."""

    def __init__(self, call: str, workers: list[str], reason: str) -> None:
        self.call = call
        self.workers = workers
        self.reason = reason
        super().__init__(f"{', '.join(workers)} died during {call}: {reason}")


class WorkerTimeout(RuntimeError):
    """Workers did not answer within the deadline: they hang, or the deadline is too short."""

    def __init__(self, call: str, workers: list[str], seconds: float, knob: str) -> None:
        self.call = call
        self.workers = workers
        self.seconds = seconds
        super().__init__(
            f"the driver waited {seconds:.0f} s for {', '.join(workers)} to finish {call}; "
            f"if the work is just long, raise {knob}; kill -USR1 PID makes a process write what it does into its log"
        )


class EngineUnusable(RuntimeError):
    """Two engines raised the same error before they sampled any token, so another engine would raise it too."""


class NoEngineLeft(RuntimeError):
    """The nodes of all engines are gone."""
