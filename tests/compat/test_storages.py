from __future__ import annotations

import pytest
import torch

from memopt.compat.fakes import new_fake_mode
from memopt.compat.tensors import bytes_by_address, is_view, storage_key, storages_of, users_of


@pytest.mark.parametrize("kind", ["cpu", "meta", "fake"])
def test_views_share_a_key_and_others_do_not(kind: str) -> None:
    with new_fake_mode() if kind == "fake" else torch.device(kind):
        one, other = torch.zeros(4), torch.zeros(4)
    assert storage_key(one) == storage_key(one.view(2, 2)) == storage_key(one.detach()[1:])
    assert storage_key(one) != storage_key(other)


def test_users_are_views_and_what_autograd_saves() -> None:
    tensor = torch.zeros(4)
    alone = users_of(tensor)
    view = tensor[1:]
    assert users_of(tensor) > alone
    del view
    product = torch.ones(4, requires_grad=True) * tensor
    assert users_of(tensor) > alone
    del product
    assert users_of(tensor) == alone


def test_is_view() -> None:
    tensor = torch.zeros(4)
    assert is_view(tensor[1:])
    assert not is_view(tensor)
    assert not is_view(tensor + 1)


def test_parts_of_a_sparse_tensor_that_is_not_coalesced() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True)
    assert [storage.nbytes() for storage in storages_of(tensor)] == [16, 8]


def test_a_tensor_of_one_dnn_has_no_storage_that_torch_hands_out() -> None:
    assert storages_of(torch.zeros(4).to_mkldnn()) == []


def test_a_nested_tensor_lies_in_one_storage() -> None:
    (storage,) = storages_of(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]))
    assert storage.nbytes() == 20


def test_bytes_by_address_counts_each_storage_once() -> None:
    tensor = torch.zeros(4)
    rows = torch.eye(4).to_sparse_csr()
    found = bytes_by_address([tensor, tensor[1:], rows, 1, torch.zeros(2, device="meta")], torch.device("cpu"))
    inside = [rows.crow_indices(), rows.col_indices(), rows.values()]
    expected = [tensor, *inside]
    assert found == {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in expected}


def test_scales_that_lie_elsewhere_than_their_weight_are_not_on_its_device() -> None:
    class Packed(torch.nn.Parameter):
        """A weight with scales in an attribute."""

    weight = Packed(torch.empty(4, device="meta"))
    weight.scales = torch.zeros(1000)  # type: ignore[attr-defined]
    assert 4000 not in bytes_by_address([weight], torch.device("meta")).values()
