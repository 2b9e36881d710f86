"""The user's own kubectl, and what it says in one line that tells what to do next."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from rlctl.cluster.hosts import answer
from rlctl.cluster.state import ClusterError

_ANSWER_S = 60.0
_INSTALL = "helm install kuberay-operator kuberay/kuberay-operator, version 1.6 or newer"
_SAYS = {
    'no matches for kind "RayCluster"': f"KubeRay is not installed there: {_INSTALL}",
    'unknown field "spec.authOptions"': f"its KubeRay is too old to set a token: {_INSTALL}",
    "the server doesn't have a resource type": f"KubeRay is not installed there: {_INSTALL}",
    "forbidden": "you may not do that there: {error}",
    "context was not found": "no such context: see `kubectl config get-contexts`, then set context=...",
    "does not exist": "{error}; see `kubectl config get-contexts`, then set context=...",
    "current-context is not set": "no cluster is chosen: see `kubectl config get-contexts`, then set context=...",
    "connection to the server": "no cluster answers: see `kubectl cluster-info`, then set context=...",
    "unable to connect to the server": "no cluster answers: see `kubectl cluster-info`, then set context=...",
    "dial tcp": "no cluster answers: see `kubectl cluster-info`, then set context=...",
    "i/o timeout": "no cluster answers: see `kubectl cluster-info`, then set context=...",
    "must be logged in": "it does not know you: log in again, and see that `kubectl get pods` works",
    "unauthorized": "it does not know you: log in again, and see that `kubectl get pods` works",
}


@dataclass(frozen=True)
class Kubectl:
    """kubectl for a context and a namespace, each empty for its own choice."""

    context: str
    namespace: str

    def command(self, *arguments: str) -> list[str]:
        """The whole command."""
        chosen = [f"--context={self.context}"] if self.context else []
        chosen += [f"--namespace={self.namespace}"] if self.namespace else []
        return ["kubectl", *chosen, *arguments]

    def run(self, *arguments: str, stdin: str = "", deadline_s: float = _ANSWER_S) -> str:
        """What it prints. Raises ClusterError."""
        if not shutil.which("kubectl"):
            raise ClusterError("kubectl is not found: install it, or print the manifest alone with --dry-run")
        try:
            done = answer(self.command(f"--request-timeout={deadline_s:g}s", *arguments), deadline_s + 10, stdin)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"kubectl: no answer within {deadline_s:g} s: see `kubectl cluster-info`") from None
        if done.returncode:
            raise ClusterError(f"kubectl: {explained(done.stderr)}")
        return done.stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        """An object or a list of them; empty where there is none."""
        found: dict[str, Any] = json.loads(self.run("get", *arguments, "--ignore-not-found", "--output=json") or "{}")
        return found


def explained(errors: str) -> str:
    """kubectl's complaint in a line."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = lines[-1].removeprefix("error: ").removeprefix("Error from server ") if lines else "it said nothing"
    for words, meaning in _SAYS.items():
        if words.lower() in errors.lower():
            return meaning.format(error=said)
    return said
