"""Prepared copies equal copies one by one, for any dtypes, strides and sizes."""

import torch

from rlctl.refit.weight_sink import LARGE, BatchedCopy


def test_every_kind_of_pair_is_copied_each_time() -> None:
    wide = torch.zeros(6, 8)
    pairs = [
        (torch.zeros(3, 4), torch.randn(3, 4)),
        (torch.zeros(5, dtype=torch.bfloat16), torch.randn(5)),
        (wide[:, 2:5], torch.randn(6, 3)),
        (torch.zeros(4, 2), torch.randn(2, 4).T),
        (torch.zeros(()), torch.tensor(3.5)),
        (torch.zeros(LARGE // 4), torch.randn(LARGE // 4)),
    ]
    prepared = BatchedCopy(pairs)
    for _ in range(2):
        for _, source in pairs:
            source.add_(1)
        prepared.run()
        assert all(torch.equal(target, source.to(target.dtype)) for target, source in pairs)
    assert (wide[:, :2] == 0).all()


def test_nothing_to_copy_is_no_error() -> None:
    BatchedCopy([]).run()
