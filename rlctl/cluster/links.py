"""The ways to another machine: ssh, a step of a Slurm job, kubectl."""

from rlctl.cluster.hosts import Host, Link

# What ssh says, and what a person does about it; of several that it says, the first here.
_SSH_SAYS = {
    "Permission denied": "key not accepted: try `ssh {host}` by hand, add your key with ssh-copy-id or ssh-add",
    "IDENTIFICATION HAS CHANGED": "host key changed: if that is right, ssh-keygen -R its name; ssh says more by hand",
    "Host key verification failed": "host key not known: run `ssh {host}` once by hand and accept it",
    "Could not resolve": "no such host: check the name, or add it to ~/.ssh/config",
    "Connection refused": "nothing answers at its ssh port: is sshd running there?",
    "timed out": "not reachable within the time for connecting",
    "No route to host": "not reachable: no route to it",
    "Network is unreachable": "not reachable: the network is down",
    "kex_exchange_identification": "its sshd took no more connections (MaxStartups): try again, or raise it there",
    "not responding": "the connection broke off: it no longer answers",
    "Connection reset": "the connection broke off: see `ssh {host}`",
    "Broken pipe": "the connection broke off: see `ssh {host}`",
    "Connection closed": "closed the connection: see `ssh {host}`",
    "closed by remote host": "closed the connection: see `ssh {host}`",
}
_SRUN_SAYS = (
    ("Invalid job id", "its job has ended"),
    ("already completing or completed", "its job has ended"),
    ("Unable to contact slurm controller", "Slurm's controller does not answer: see `scontrol ping`"),
    ("Unable to confirm allocation", "its job has ended, or Slurm's controller does not answer: see `squeue --me`"),
    ("Requested node configuration is not available", "its job has this node no more"),
    ("Unable to create step", "Slurm gives its job no further step: see `scontrol show job`"),
)
_KUBECTL_SAYS = (
    ('cannot create resource "pods/exec"', "you may not run programs in its pods (pods/exec)"),
    ("NotFound", "its pod is gone"),
    ("dial tcp", "no cluster answers: see `kubectl cluster-info`"),
)
# Set within a job, and then they name that one; SLURM_CONF says where Slurm is.
SLURM_HIDES = ("SLURM_", ("SLURM_CONF",))


def ssh_host(name: str, python: str, connect_timeout_s: int, options: list[str]) -> Host:
    """A host, to be reached with the user's own ssh, which gives up on a silent one."""
    alive = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
    before = ("ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_timeout_s}", *alive)
    says = tuple((words, meaning.format(host=name)) for words, meaning in _SSH_SAYS.items())
    return Host(name, python, Link((*before, *options, "--", name), shell=True, says=says, fails=255))


def slurm_host(name: str, python: str, job: str, setup: list[str]) -> Host:
    """A node of a job, to be reached by a step beside those that run: it asks for nothing of its own."""
    asked = (f"--jobid={job}", f"--nodelist={name}", "--nodes=1", "--ntasks=1", "--mem=0")
    command = ("srun", "--overlap", "--quiet", *asked, "--chdir=/", "--")
    return Host(name, python, Link(command, shell=False, says=_SRUN_SAYS, hides=SLURM_HIDES), tuple(setup))


def pod_host(name: str, python: str, context: str, namespace: str) -> Host:
    """A pod of Ray's, to be reached with the user's own kubectl."""
    chosen = [f"--context={context}"] if context else []
    chosen += [f"--namespace={namespace}"] if namespace else []
    command = ("kubectl", *chosen, "exec", "--stdin", "--quiet", name, "--")
    return Host(name, python, Link(command, shell=False, says=_KUBECTL_SAYS))
