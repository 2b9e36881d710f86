"""A cluster's config: defaults in configs/cluster alone, every mistake at once, in one line each."""

from pathlib import Path

import pytest

from rlctl.config.cluster_schema import CLUSTER_KINDS, LocalCluster, SshCluster
from rlctl.config.errors import ConfigError
from rlctl.config.fields import schema_keys
from rlctl.config.load_cluster import cluster_names, load_cluster


def collect_problems(cluster: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_cluster(cluster, list(overrides))
    return [str(problem) for problem in raised.value.problems]


def test_the_shipped_clusters_are_complete() -> None:
    assert cluster_names() == sorted(CLUSTER_KINDS)
    local = load_cluster("local", [])
    assert isinstance(local, LocalCluster)
    assert (local.name, local.nodes, local.listen_on_all) == ("local", 1, False)
    ssh = load_cluster("ssh", ["hosts=[a, b]"])
    assert isinstance(ssh, SshCluster)
    assert (ssh.hosts, ssh.min_hosts, ssh.port, ssh.listen_on_all) == (["a", "b"], None, 6379, False)
    assert collect_problems("ssh") == [
        "configs/cluster/ssh.yaml: hosts: not set, and has no default: "
        "Hosts as ssh takes them, [user@]name. The first that is fit is the head"
    ]


def test_a_file_of_ones_own_gives_the_name(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("defaults: cluster/ssh.yaml\nhosts: [gpu1, me@gpu2]\nmin_hosts: 1\n")
    for cluster in (str(file), str(tmp_path / "lab")):
        config = load_cluster(cluster, [])
        assert (config.name, config.kind) == ("lab", "ssh")
    assert load_cluster(str(file), ["name=other"]).name == "other"


def test_every_key_says_what_it_means() -> None:
    for kind in CLUSTER_KINDS.values():
        assert all(field.metadata["doc"] for _, field in schema_keys(kind))


def test_all_mistakes_are_told_at_once() -> None:
    overrides = ["hosts=[a, a, -oProxyCommand=x]", "min_hosts=5", "other_ports=[2000, 2003]", "prot=5"]
    assert collect_problems("ssh", *overrides) == [
        "override 4: prot=5: unknown key; did you mean port?",
        "override 1: hosts=[a, a, -oProxyCommand=x]: not a host name: '-oProxyCommand=x'",
        "override 2: min_hosts=5: must be at most 3, the number of hosts, not 5",
        "override 3: other_ports=[2000, 2003]: must be [first, last] with room for 21 ports or more, not [2000, 2003]",
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("hosts=[]", "must name at least one host"),
        ("hosts=[a, a]", "a named twice"),
        ("hosts=[a/b]", "not a host name: 'a/b'"),
        ("name=../x", "must be letters, digits"),
        ("port=8265", "dashboard_port: must differ from port"),
        ("other_ports=[6000, 7000]", "must leave out port 6379"),
        ("python=3.11", None),
    ],
)
def test_what_a_type_cannot_say(override: str, problem: str | None) -> None:
    overrides = [override]
    if not override.startswith("hosts"):
        overrides.insert(0, "hosts=[a]")
    if problem is None:
        assert load_cluster("ssh", overrides)
    else:
        assert problem in collect_problems("ssh", *overrides)[0]


def test_a_wrong_name_or_kind_leads_on(tmp_path: Path) -> None:
    assert collect_problems("locl") == ["locl: no such cluster or file; did you mean local?"]
    file = tmp_path / "x.yaml"
    file.write_text("kind: slurmm\n")
    assert "kubernetes: inherit it, such as `defaults: cluster/local.yaml`" in collect_problems(str(file))[0]
    file.write_text("kind: local\nnodes: 2\n")
    assert "missing key: inherit the defaults, `defaults: cluster/local.yaml`" in collect_problems(str(file))[0]
