"""Batches in a `UserDict`, which torch's pytrees take for a leaf."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BatchEncoding

import memopt
from memopt.capture.inputs import copied, tensors_in
from memopt.compat.operators import tree_leaves, tree_map


def test_the_items_of_a_user_dict_are_leaves() -> None:
    tree = [BatchEncoding({"ids": torch.ones(2), "more": [1, BatchEncoding({"mask": 2})]}), 3]
    leaves = tree_leaves(tree)
    assert leaves[1:] == [1, 2, 3]
    mapped = tree_map(lambda leaf: leaf + 1, tree)
    assert isinstance(mapped[0], BatchEncoding)
    assert tree_leaves(mapped)[1:] == [2, 3, 4]
    assert torch.equal(mapped[0]["ids"], torch.full((2,), 2.0))
    assert torch.equal(tree[0]["ids"], torch.ones(2))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.tags = nn.Embedding(50, 16), nn.Linear(16, 4)

    def forward(self, features: BatchEncoding) -> torch.Tensor:
        return self.tags(self.words(features["ids"])).square().mean()  # type: ignore[no-any-return]


@pytest.mark.plans_always
def test_a_batch_in_one_is_counted_and_copied() -> None:
    ids = torch.randint(0, 50, (8, 32))
    call = (BatchEncoding({"ids": ids}),), {}
    assert list(tensors_in(call)) == [ids]
    assert copied(call)[0][0]["ids"] is not ids
    model = memopt.optimize(Tagger().train(), 1, optimizer=None, precision="fp32", allow={"recompute"})
    for _ in range(2):
        model(*call[0]).backward()
    assert memopt.plan_of(model).account.inputs == ids.nbytes
    assert "(8, 32): peak" in str(memopt.status(model))
