"""The check of a host, run on this machine, and the verdict on a host from the results of its check."""

import socket
from importlib.metadata import version
from typing import Any

import pytest

from rlctl.cluster.hosts import Host, HostError, script, ssh_host
from rlctl.cluster.requirements import clock_skew, facts, minor, problems, taken_port_problems, warnings
from rlctl.preflight.version import own_version

GOOD: dict[str, Any] = {
    "time": 100.5,
    "python": "3.11.7",
    "ray": "2.60.0",
    "psutil": "7.0",
    "rlctl": own_version(),
    "cores": 8,
    "memory": 64 << 30,
    "shm": 32 << 30,
    "root": "/tmp",
    "disk": 50 << 30,
    "gpus": [],
    "driver": None,
    "taken": [],
}


def judge(**changes: Any) -> list[str]:
    reply = GOOD | changes
    skew = clock_skew(reply["time"], began=100, ended=101)
    return problems(reply, min_disk_gib=5, skew_s=skew, max_clock_skew_s=5)


def test_a_good_host_will_do() -> None:
    assert judge() == []
    assert facts(GOOD) == "Python 3.11.7, Ray 2.60.0, 8 CPUs, 64 GiB, no GPU, 50 GiB disk"
    with_gpus = GOOD | {"gpus": ["H200"] * 8, "driver": "570.1"}
    assert "8 x H200, driver 570.1" in facts(with_gpus)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"python": "3.9.2"}, "wrong Python 3.9.2: rlctl needs 3.11 or newer; set python=..."),
        ({"ray": None}, "ray not installed in its Python: pip install rlctl there, or set python=..."),
        ({"ray": None, "rlctl": None}, "ray and rlctl not installed in its Python: pip install rlctl there"),
        ({"rlctl": "0.0.1"}, f"wrong rlctl 0.0.1: pip install rlctl=={own_version()} there"),
        ({"ray": "2.48.0"}, "wrong Ray 2.48.0: pip install 'ray>=2.60,<2.61' there"),
        ({"time": 131.0}, "its clock is 30.0 s fast: start its time service (NTP)"),
        ({"time": 60.0}, "its clock is 40.0 s slow: start its time service (NTP)"),
        ({"disk": 1 << 30}, "disk full: 1.0 GiB free in /tmp, 5 wanted (min_disk_gib)"),
        ({"root": None}, "no folder for Ray's files: neither TMPDIR nor /tmp can be written to there"),
    ],
)
def test_each_lack_is_a_line_with_what_mends_it(changes: dict[str, Any], problem: str) -> None:
    assert [line[: len(problem)] for line in judge(**changes)] == [problem]


def test_all_lacks_are_told_at_once() -> None:
    assert len(judge(python="3.8.1", ray="1.0.0", time=0.0, disk=0)) == 4
    assert taken_port_problems(GOOD | {"taken": [6379]}) == [
        "port 6379 is taken: stop what listens there, or set another"
    ]


@pytest.mark.parametrize(("time", "skew"), [(100.0, 0), (101.0, 0), (101.5, 0.5), (99.0, -1.0)])
def test_a_slow_answer_is_no_skew(time: float, skew: float) -> None:
    assert clock_skew(time, 100, 101) == skew


def test_warnings_are_of_what_works_but_not_well() -> None:
    first = GOOD | {"driver": "570.1"}
    second = GOOD | {"driver": "550.2", "shm": 64 << 20}
    assert warnings({"a": first, "b": first}) == []
    assert warnings({"a": first, "b": second}) == [
        "b: /dev/shm has 0.1 GiB; in a container: --shm-size=2g or more",
        "mixed CUDA drivers: 550.2 on b; 570.1 on a",
    ]


def test_the_check_answers_here_and_sees_a_taken_port() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        reply = Host("").run("check.run", {"ports": [port, 0]}, 300)
    assert reply["taken"] == [port]
    assert reply.keys() >= GOOD.keys()
    assert minor(reply["ray"]) == minor(version("ray"))


def test_a_program_that_fails_or_hangs_is_one_line() -> None:
    with pytest.raises(HostError, match="KeyError: 'ports'"):
        Host("").run("check.run", {}, 300)
    with pytest.raises(HostError, match=r"no answer within 0\.01 s"):
        Host("").run("check.run", {"ports": []}, 0.01)


def test_what_is_secret_goes_through_the_standard_input_alone() -> None:
    command = ssh_host("gpu1", "~/my env/python", 9, ["-p", "22"]).command()
    assert command[:6] == ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=9"]
    assert command[-5:] == ["-p", "22", "--", "gpu1", "~/'my env/python' -"]
    assert "a secret" in script("node.start", {"token": "a secret"})
