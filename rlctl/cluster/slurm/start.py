"""Brings a job's cluster up: submits it, waits for the nodes it is given, then for what they say."""

import time

from rlctl.cluster.launcher import Say
from rlctl.cluster.machines.nodes import TOO_SLOW
from rlctl.cluster.ray_start import joined
from rlctl.cluster.requirements import HostReply, Requirements, facts, problems, wanted_ray
from rlctl.cluster.slurm import queue
from rlctl.cluster.slurm.batch import batch_script, job_plan
from rlctl.cluster.slurm.folder import JobFolder
from rlctl.cluster.state import ClusterError, ClusterNode, ClusterState, ClusterStore
from rlctl.config.cluster_schema import SlurmCluster

# Between two questions to Slurm, whose controller all users share.
_QUEUE_S, _CARDS_S = 5.0, 0.5
# A file may be seen on another machine of a network file system so much later.
_FILES_S = 90.0


class JobStarter:
    """Starts what `state` names; keeps the state's file up to date."""

    def __init__(
        self, config: SlurmCluster, store: ClusterStore, state: ClusterState, shared: JobFolder, token: str, say: Say
    ) -> None:
        self._config, self._store, self._state, self._shared, self._say = config, store, state, shared, say
        self._token = token

    def start(self) -> list[str]:
        """Returns warnings. Raises ClusterError if not every node came up."""
        config, state = self._config, self._state
        script = batch_script(config, state.job_name, state.shared, state.python)
        self._shared.make()
        self._shared.fill(script, job_plan(config, state, TOO_SLOW), self._token)
        self._say("doing", "submitting")
        state.job = queue.submit(str(self._shared.script))
        self._store.save(state)
        self._say("ok", f"submitted as job {state.job}")
        self._allocated()
        self._come_up()
        if state.dashboard:
            return []
        return ["no dashboard, no job API: install 'ray[default]' on the nodes for them"]

    def _allocated(self) -> None:
        began, told = time.monotonic(), ""
        while (job := queue.look_up(self._state.job)).waits:
            waited = time.monotonic() - began
            if waited > self._config.wait_s:
                what = f"job {job.id} still waits in the queue after {waited:.0f} s: {job.reason}; nothing stands"
                raise ClusterError(f"{what}: ask for less, or wait longer with wait_s=...")
            if job.reason not in ("None", told):
                told = job.reason
                self._say("ok", f"job {job.id} waits in the queue: {told}")
            self._say("doing", f"job {job.id} waits in the queue: {job.reason}, {waited:.0f} s")
            # Soon at first, then with more patience.
            time.sleep(min(_QUEUE_S, 0.5 + waited / 10))
        if not job.runs:
            raise ClusterError(f"{self._why(job)}; nothing stands")
        self._say("ok", f"job {job.id} runs on {job.nodes} after {time.monotonic() - began:.0f} s")

    def _come_up(self) -> None:
        """Until every node has said that it is ready."""
        began, asked, count = time.monotonic(), 0.0, len(self._state.nodes)
        ready: set[int] = set()
        while len(ready) < count:
            cards = self._shared.cards()
            self._say("doing", f"starting {count - len(ready)} of {count} nodes")
            for index, card in sorted(cards.items()):
                self._judge(card)
                if card.get("ready") and index not in ready and (index == 0 or 0 in ready):
                    ready.add(index)
                    self._record(index, card)
                    where = f", at {self._state.address}" if index == 0 else ""
                    text = f"{facts(card['found'])}; up in {time.monotonic() - began:.1f} s{where}"
                    self._say("ok", f"{card['name']}: {text}")
            if time.monotonic() > asked + _QUEUE_S:
                asked = time.monotonic()
                if not (job := queue.look_up(self._state.job)).runs:
                    raise ClusterError(f"{self._why(job)}; nothing stands: rlctl cluster logs {self._state.name}")
            if time.monotonic() > began + 2 * self._config.start_timeout_s + _FILES_S:
                what = f"{count - len(ready)} of {count} nodes of job {self._state.job} said nothing"
                shared = f"is {self._shared.path} on a file system that they share? set shared_folder=..."
                raise ClusterError(f"{what}: {shared}")
            time.sleep(_CARDS_S)

    def _judge(self, card: dict[str, object]) -> None:
        """Raises ClusterError for a node that will not do, or has failed."""
        found, name = card.get("found"), card.get("name")
        bad: list[str] = []
        if isinstance(found, dict):
            # Slurm keeps the clocks together itself: its messages are not taken otherwise.
            bad = problems(HostReply(str(name), found, found["time"], found["time"]), self._wanted())
        if card.get("why"):
            bad = bad or [f"did not start: {card['why']}"]
        for problem in bad:
            self._say("bad", f"{name}: {problem}")
        if bad:
            raise ClusterError(
                f"{name} will not do, nothing stands; all it wrote: rlctl cluster logs {self._state.name}"
            )

    def _wanted(self) -> Requirements:
        return Requirements(wanted_ray(), self._config.min_disk_gib, 1)

    def _record(self, index: int, card: dict[str, object]) -> None:
        state = self._state
        pid, began = int(str(card["pid"])), float(str(card["create_time"]))
        node = ClusterNode(
            str(card["name"]), str(card["host"]), str(card["folder"]), index == 0, str(card["address"]), pid, began
        )
        state.nodes[index] = node
        if index == 0:
            ports = card["ports"]
            assert isinstance(ports, dict)
            state.address = joined(node.address, ports["port"])
            state.dashboard = ports["dashboard-port"] if card["dashboard"] else 0
        self._store.save(state)

    def _why(self, job: queue.Job) -> str:
        said = self._shared.last_words()
        return job.ending + (f": {said}" if said else "")
