"""`rlctl loss check`: one line a property, exit code 1 if one fails, 2 for a loss or key that does not exist."""

from pathlib import Path

from tests.unit.cli.conftest import Rlctl

MINE = """
from dataclasses import dataclass
from rlctl.grpo.losses.base import PolicyLoss, PolicyTerm

@dataclass(frozen=True)
class Mine(PolicyLoss):
    scale: float = 1.0

    def policy(self, tokens):
        return PolicyTerm(-self.scale * tokens.advantage * tokens.log_prob / tokens.mask.sum())
"""


def test_a_loss_of_rlctl_holds(rlctl: Rlctl) -> None:
    done = rlctl("loss", "check", "gspo", "level=token", "async.enabled=true")
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()] == ["holds"] * 10


def test_a_plugin_that_depends_on_packing_is_told_so(rlctl: Rlctl, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    done = rlctl("loss", "check", f"{tmp_path / 'mine.py'}:Mine", "scale=2")
    assert done.code == 1
    assert "failed  packing: the loss is " in done.out and "divide by no count" in done.out


def test_unknown_losses_and_keys_are_bad_input(rlctl: Rlctl, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    for arguments, message in (
        (["gpso"], "did you mean gspo?"),
        (["gspo", "reduction=token"], "grpo.loss.reduction=token: unknown key"),
        ([f"{tmp_path / 'mine.py'}:Mine", "scal=2"], "scal"),
    ):
        done = rlctl("loss", "check", *arguments)
        assert done.code == 2 and message in done.err, done.err
