"""`rlctl train --cluster`, as far as it can be tested without a cluster."""

import pytest
import yaml

from tests.unit.cli.conftest import Rlctl


def test_options_of_a_cluster_need_one(rlctl: Rlctl) -> None:
    done = rlctl("train", "grpo", "grpo.recipe.yaml", "--wait", "--detach", "--env", "HOME")
    assert done.code == 2
    assert "--wait: goes with --cluster NAME" in done.err
    assert "--detach: goes with --cluster NAME" in done.err
    assert "3 problems" in done.err
    done = rlctl("train", "grpo", "grpo.recipe.yaml", "--cluster", "here", "--wait", "--detach")
    assert (done.code, "1 problem;" in done.err) == (2, True)


def test_here_is_within_a_job(rlctl: Rlctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done = rlctl("train", "grpo", "grpo.recipe.yaml", "--cluster", "here")
    assert done.code == 2
    assert "--cluster here: this is no job of a cluster: RAY_ADDRESS is not set" in done.err


def test_a_job_of_kubernetes_is_a_manifest_with_the_command(rlctl: Rlctl) -> None:
    command = "train grpo my.yaml --cluster here --wait"
    up = ("cluster", "up", "kubernetes", "image=me/rlctl:1")
    job = yaml.safe_load(rlctl(*up, "--dry-run", "--job", command).out)
    assert (job["kind"], job["spec"]["entrypoint"]) == ("RayJob", f"python -m rlctl.cli.main {command}")
    done = rlctl(*up, "--job", command)
    assert (done.code, "--job: goes with --dry-run" in done.err) == (2, True)
    done = rlctl("cluster", "up", "local", "--dry-run", "--job", command)
    assert done.code == 1
